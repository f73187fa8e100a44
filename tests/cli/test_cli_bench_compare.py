"""`bench compare` as a user runs it: files in, a table or a document out, an exit code."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import children
import peer_reader as peer
import pytest
import test_schemas as schemas
from json_schemas import errors

from llmcli.commands.bench import compare
from llmcli.errors import UsageError

DATA = Path(__file__).parents[1] / "data" / "llama_bench"
BEFORE = str(DATA / "results.json")
Cli = Callable[..., Any]


@pytest.fixture
def after(tmp_path: Path) -> Callable[..., str]:
    """The results of BEFORE with each time multiplied, and further changes, in a file."""

    def write(*times: float, **changes: Any) -> str:
        rows = json.loads(Path(BEFORE).read_text())
        for row, factor in zip(rows, times, strict=False):
            row |= {"samples_ns": [ns * factor for ns in row["samples_ns"]]} | changes
            rates = [1e9 * (row["n_prompt"] + row["n_gen"]) / ns for ns in row["samples_ns"]]
            if rates and "avg_ts" not in changes:
                row["avg_ts"] = fmean(rates)
        file = tmp_path / "after.json"
        file.write_text(json.dumps(rows[: len(times)]))
        return str(file)

    return write


def test_a_table_with_ratios_and_noise(cli: Cli, after: Callable[..., str]) -> None:
    result = cli("bench", "compare", BEFORE, after(0.5, 1.001, 1.25, n_threads=8))
    assert (result.code, result.err) == (0, "")
    assert "A → B: n_threads 4 → 8" in result.out
    lines = [line for line in result.out.splitlines() if line.startswith(("pp", "tg"))]
    assert [line.split("   ")[-1] for line in lines] == [
        "2× as fast",
        "within noise",
        "20 % slower",
    ]
    assert "791.40 ± 7.44" in lines[0]
    assert "2.000" in lines[0]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "md"])
def test_formats_may_be_mixed(cli: Cli, kind: str) -> None:
    result = cli("bench", "compare", BEFORE, str(DATA / f"results.{kind}"), "--json")
    ratios = [test["ratio"] for test in result.json()["tests"]]
    assert ratios == pytest.approx([1, 1, 1], abs=1e-4)
    assert {test["verdict"] for test in result.json()["tests"]} == {"noise"}


@pytest.mark.parametrize(
    ("bound", "code"), [("5%", 1), ("5", 1), ("19.9 %", 1), ("21%", 0), ("99.5%", 0), ("0%", 1)]
)
def test_a_bound(cli: Cli, after: Callable[..., str], bound: str, code: int) -> None:
    slower = after(1, 1, 1.25)
    result = cli("bench", "compare", BEFORE, slower, "--fail-if-slower", bound)
    assert result.code == code
    assert ("✗ 1 test is more than" in result.out) is bool(code)
    if code:
        error, hint = result.err.splitlines()
        assert error.startswith("error: 1 test is more than ")
        assert error.endswith(" % slower: pp512+tg128 @ d1024 (0.800)")
        assert error.removeprefix("error: ") in result.out
        assert hint.startswith("hint: that is beyond noise")
    else:
        assert "✓ no test of B is more than" in result.out
        assert result.err == ""


def test_a_failed_bound_says_whether_it_is_noise(cli: Cli, after: Callable[..., str]) -> None:
    result = cli("bench", "compare", BEFORE, after(1.001), "--fail-if-slower", "0%")
    assert result.code == 1
    error, hint = result.err.splitlines()
    assert error == "error: 1 test is more than 0 % slower: pp512 (0.999, within noise)"
    assert hint == "hint: more repetitions (`-r`) make the noise smaller"


def test_one_that_failed_in_b_fails(cli: Cli, tmp_path: Path) -> None:
    rows = json.loads(Path(BEFORE).read_text())
    rows[1] |= {"error": "it does not fit", "samples_ns": []}
    b = tmp_path / "b.json"
    b.write_text(json.dumps(rows))
    result = cli("bench", "compare", BEFORE, str(b), "--fail-if-slower", "50%")
    assert result.code == 1
    assert "✗ 1 test has failed: tg128" in result.out
    error, hint = result.err.splitlines()
    assert error == "error: 1 test has failed: tg128"
    assert hint == "hint: the result says why, at `no rate in B`"


def test_what_failed_in_b_fails(cli: Cli, after: Callable[..., str]) -> None:
    broken = after(1, 1, 1, error="it does not fit", samples_ns=[])
    result = cli("bench", "compare", BEFORE, broken, "--fail-if-slower", "50%")
    assert result.code == 1
    assert "no rate in B: tg128: it does not fit (A: 99.16 ± 1.10 t/s)" in result.out
    assert cli("bench", "compare", broken, BEFORE).code == 1, "nothing is compared"


def test_nothing_in_common(cli: Cli, after: Callable[..., str]) -> None:
    result = cli("bench", "compare", BEFORE, after(1, n_prompt=7))
    assert result.code == 1
    assert "only in A: tg128: 99.16" in result.out
    assert result.err.startswith(f"error: no test has a rate in `{BEFORE}` and in ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "needs A"),
        ([BEFORE], "needs B"),
        ([BEFORE, BEFORE, BEFORE], "one argument too many"),
        ([BEFORE, "./nowhere.json"], "cannot read `./nowhere.json`: no such file"),
        ([BEFORE, str(DATA)], "is a directory"),
        ([BEFORE, ""], "the name of the file is empty"),
        ([BEFORE, __file__], "is no result of a benchmark"),
        ([BEFORE, "/dev/null"], "`/dev/null` is empty"),
        (["-", "-"], "`-` can be one side only"),
        ([BEFORE, BEFORE, "--fail-if-slower", "fast"], "not `fast`"),
        ([BEFORE, BEFORE, "--fail-if-slower", "100%"], "not `100%`"),
        ([BEFORE, BEFORE, "--fail-if-slower", "-5%"], "not `-5%`"),
        ([BEFORE, BEFORE, "--fail-if-slower", "0.05"], "may be 0.05 % or 5 %"),
    ],
)
def test_usage(cli: Cli, argv: list[str], words: str) -> None:
    result = cli("bench", "compare", *argv)
    assert (result.code, result.out) == (2, "")
    error, hint = result.err.splitlines()
    assert words in error
    assert hint.startswith("hint: ")


def test_a_file_beside_it_is_meant(cli: Cli) -> None:
    result = cli("bench", "compare", BEFORE, str(DATA / "result.json"))
    assert result.err.splitlines()[1] == f"hint: did you mean `{BEFORE}`?"


def test_an_endless_file_is_not_read_to_its_end(cli: Cli, monkeypatch: Any) -> None:
    monkeypatch.setattr("llmcli.commands.bench.compare.MOST", 1 << 16)
    result = cli("bench", "compare", BEFORE, "/dev/zero")
    assert (result.code, "too large" in result.err) == (2, True)


def test_stdin(cli: Cli, monkeypatch: Any) -> None:
    text = io.TextIOWrapper(io.BytesIO(Path(BEFORE).read_bytes()))
    monkeypatch.setattr(sys, "stdin", text)
    result = cli("bench", "compare", "-", BEFORE)
    assert result.code == 0
    assert result.out.startswith("A  stdin · JSON · 3 rows")


def test_no_torch() -> None:
    """Two tables are compared in an instant."""
    code = (
        "import sys; from llmcli.cli.app import main; "
        f"assert main(['bench', 'compare', {BEFORE!r}, {BEFORE!r}, '--json']) == 0; "
        "sys.exit('torch' in sys.modules)"
    )
    run = children.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_help(cli: Cli) -> None:
    result = cli("bench", "compare", "-h")
    assert result.code == 0
    assert "usage: llmcli bench compare [OPTIONS] A B" in result.out
    assert "--fail-if-slower PERCENT" in result.out
    assert "within noise or not" in " ".join(result.out.split())


def test_a_side_that_other_programs_slowed_down_is_named(cli: Cli, tmp_path: Path) -> None:
    document = {"schema": "llmcli.bench/1", "rows": json.loads(Path(BEFORE).read_text())}
    files = []
    for name, load in (("quiet", {"slowed": False}), ("busy", {"slowed": True}), ("old", None)):
        files.append(tmp_path / name)
        files[-1].write_text(json.dumps(document | {"machine_load": load}))
    quiet, busy, old = map(str, files)
    assert "slowed down by other programs while measured: B\n" in (
        cli("bench", "compare", quiet, busy).out
    )
    assert "while measured: A and B\n" in cli("bench", "compare", busy, busy).out
    assert "other programs" not in cli("bench", "compare", quiet, old).out
    said = cli("bench", "compare", busy, old, "--json").json()
    assert (said["a"]["slowed"], said["b"]["slowed"]) == (True, None)


# the document


def test_every_key_of_the_document_has_its_line_in_the_schema(
    cli: Cli, after: Callable[..., str], tmp_path: Path
) -> None:
    rows = json.loads(Path(BEFORE).read_text())
    rows[1] |= {"error": "no", "samples_ns": []}
    several = [*rows, rows[0] | {"n_threads": 9}, rows[2] | {"n_gen": 3, "samples_ns": [1e9]}]
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps([rows[0] | {"n_threads": 9}, *json.loads(Path(BEFORE).read_text())]))
    b.write_text(json.dumps([row | {"type_k": "q8_0", "dtype": "x"} for row in several]))
    result = cli("bench", "compare", str(a), str(b), "--json", "--fail-if-slower", "5%")
    said = result.json()
    assert errors(said, "bench-compare") == []
    assert all(said[key] for key in ("differences", "unsaid", "tests", "lone"))
    missed = []
    names = {"settings"}
    for path, required in schemas._places(said):
        value = schemas._at(said, path)
        wrong = {"wrong": 1} if isinstance(value, list | type(None)) else [[value]]
        inside = bool(names & set(path[:-1]))
        without = schemas._without(said, path)
        if required and not inside and not errors(without, "bench-compare"):
            missed.append(("without", path))
        if not errors(schemas._with(said, path, wrong), "bench-compare"):
            missed.append(("mistyped", path))
    assert missed == []


def test_a_red_document(cli: Cli, after: Callable[..., str]) -> None:
    result = cli("bench", "compare", BEFORE, after(2, 1, 1), "--json", "--fail-if-slower", "5%")
    said = result.json()
    assert (result.code, said["ok"], said["too_slow"]) == (1, False, [0])
    assert said["tests"][0]["ratio"] == pytest.approx(0.5)
    assert errors(said, "bench-compare") == []


# a real run of ours


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `bench` writes in every format."""
    folder = tmp_path_factory.mktemp("ours")
    argv = ["bench", "-m", "tiny", "-p", "4", "-n", "2", "-t", "1", "-r", "3", "--no-ceilings"]
    files = {kind: str(folder / kind) for kind in ("json", "jsonl", "csv", "sql", "md", "document")}
    code = (
        "import contextlib, sys; from llmcli.cli.app import main\n"
        f"for kind, path in {files!r}.items():\n"
        "    out = ['--json'] if kind == 'document' else ['-o', kind]\n"
        "    with open(path, 'w', encoding='utf-8') as file, contextlib.redirect_stdout(file):\n"
        f"        code = main([*{argv!r}, *out])\n"
        "    assert code == 0"
    )
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    run = children.run([sys.executable, "-c", code], capture_output=True, env=settings)
    assert run.returncode == 0, run.stderr
    return files


@pytest.mark.parametrize("kind", ["jsonl", "csv", "md", "document"])
def test_our_own_results_in_every_format(cli: Cli, ours: dict[str, str], kind: str) -> None:
    said = cli("bench", "compare", ours["json"], ours[kind], "--json").json()
    assert [test["test"] for test in said["tests"]] == ["pp4", "tg2"]
    assert said["lone"] == said["differences"] == []
    for test in said["tests"]:
        assert test["a"]["runs"] == 3
        assert test["b"]["runs"] == (None if kind == "md" else 3)
        assert test["b"]["mean"] > 0


def test_the_programs_that_read_llama_bench_read_a_real_run(ours: dict[str, str]) -> None:
    readers = {"json": peer.from_json, "jsonl": peer.from_jsonl, "csv": peer.from_csv,
               "sql": peer.from_sql}  # fmt: skip
    for kind, read in readers.items():
        base = read(Path(ours[kind]).read_text("utf-8"))
        assert [row[:3] for row in peer.paired(base)] == [(4, 0, 0), (0, 2, 0)]
        assert peer.mistyped(base) == []
    rows = peer.from_markdown(Path(ours["md"]).read_text("utf-8"))
    assert [row["test"] for row in rows] == ["pp4", "tg2"]


def test_a_file_whose_rows_have_all_failed(cli: Cli, after: Callable[..., str]) -> None:
    path = after(1, 1, error="out of memory")
    result = cli("bench", "compare", BEFORE, path)
    assert result.code == 1
    assert f"error: no row of `{path}` has a rate: all of them have failed\nhint: " in result.err


def test_a_mean_that_its_runs_contradict_is_told(cli: Cli, after: Callable[..., str]) -> None:
    path = after(1, 1, avg_ts=3.5)
    told = cli("bench", "compare", BEFORE, path).err
    assert told.startswith(f"note: row 1 of `{path}` says 3.5 tokens per second, and its runs 7")
    assert told.endswith(": compared are the runs (and 1 more)\n")
    assert cli("bench", "compare", BEFORE, path, "--quiet").err == ""
    assert cli("bench", "compare", BEFORE, BEFORE).err == ""


def test_hints_name_this_command(cli: Cli) -> None:
    third = cli("bench", "compare", BEFORE, BEFORE, BEFORE)
    assert third.code == 2
    assert third.err.endswith("is one argument too many\nhint: see `llmcli bench compare --help`\n")


def test_an_error_without_a_hint_of_its_own(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, out: Any) -> Any:
        raise UsageError("it cannot be")

    monkeypatch.setattr(compare, "_read", fail)
    assert cli("bench", "compare", "x", "y").err == (
        "error: it cannot be\nhint: see `llmcli bench compare --help`\n"
    )
