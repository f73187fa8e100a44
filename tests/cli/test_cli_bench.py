"""`llmcli bench`: llama-bench's options, what is written where, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import children
import pytest
from cli_tiny import write_tiny

import llmcli
from llmcli.commands.bench import ending
from llmcli.commands.bench.measure.ours import Ours
from llmcli.commands.bench.report.fields import FIELDS, OUR_SAMPLES, OURS, SAMPLES
from llmcli.kernels import native

NAMES = [field.name for field in FIELDS]
# the published list, by hand: what other programs look for
PUBLISHED = [
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename",
    "model_type", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads",
    "cpu_mask", "cpu_strict", "poll", "type_k", "type_v", "n_gpu_layers", "n_cpu_moe",
    "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split",
    "tensor_buft_overrides", "use_mmap", "embeddings", "no_op_offload", "no_host", "n_prompt",
    "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("bench") / "m", weights=True))


@pytest.fixture
def bench(cli: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """Short tests on the small model, without ceilings."""

    def run(*argv: str) -> Any:
        sizes = [] if "-p" in argv or "--n_prompt" in argv else ["-p", "8", "-n", "3"]
        model = [] if "-m" in argv else ["-m", folder]
        dtype = [] if "--dtype" in argv else ["--dtype", "float32"]
        return cli("bench", *model, *sizes, *dtype, "-r", "2", "-t", "1", "--no-ceilings", *argv)

    return run


def rows(result: Any) -> list[dict[str, Any]]:
    assert result.code == 0, result.err
    found: list[dict[str, Any]] = json.loads(result.out)
    return found


def test_markdown(bench: Callable[..., Any]) -> None:
    result = bench("-pg", "4,2", "-d", "0,5")
    assert (result.code, result.err) == (0, "")
    table, rest = result.out.split("\n\n", 1)
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        "model", "size", "params", "backend", "threads", "dtype", "test", "t/s",
    ]  # fmt: skip
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[-2] for row in cells] == [
        "pp8", "tg3", "pp4+tg2", "pp8 @ d5", "tg3 @ d5", "pp4+tg2 @ d5",
    ]  # fmt: skip
    assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", row[-1]) for row in cells)
    assert {(row[3], row[4]) for row in cells} == {("CPU", "1")}
    assert re.match(r"build: [0-9a-f]{8} \(\d+\)\n\n", rest) or llmcli.__version__ in rest
    assert "|" not in rest  # what is ours looks like no row of the table
    for heading in ("first token", "token p50", "peak RSS", "base ", "load "):
        assert heading in rest


def test_columns_appear_where_they_vary(bench: Callable[..., Any]) -> None:
    head = bench("-b", "4,8", "-ub", "4", "-fa", "on", "-n", "0", "-p", "8").out
    names = [cell.strip() for cell in head.splitlines()[0].split("|")[1:-1]]
    assert names[4:-2] == ["threads", "n_batch", "n_ubatch", "fa", "dtype"]


def test_json_has_their_keys_then_ours(bench: Callable[..., Any], folder: str) -> None:
    assert NAMES == PUBLISHED
    found = rows(bench("-r", "4", "-pg", "4,2", "-o", "json"))
    ours = [field.name for field in (*OURS, *OUR_SAMPLES)]
    for row in found:
        assert list(row) == [*NAMES, *(field.name for field in SAMPLES), *ours]
        assert not [name for name in NAMES if row[name] is None]
        assert row["model_filename"] == folder
        assert type(row["build_number"]) is int
        datetime.strptime(row["test_time"], "%Y-%m-%dT%H:%M:%SZ")
        assert type(row["cpu_strict"]) is type(row["use_mmap"]) is bool
        assert type(row["flash_attn"]) is type(row["no_op_offload"]) is int
        # statistics are those of the runs
        tokens, times = row["n_prompt"] + row["n_gen"], row["samples_ns"]
        rates = [1e9 * tokens / ns for ns in times]
        assert len(times) == 4
        assert row["samples_ts"] == pytest.approx(rates, abs=1e-6)
        assert row["avg_ts"] == pytest.approx(fmean(rates), abs=1e-6)
        assert row["stddev_ts"] == pytest.approx(stdev(rates), abs=1e-6)
        assert row["avg_ns"] == int(fmean(times))
        assert row["stddev_ns"] == int(stdev(times))
        assert (row["ttft_ns"] is None) == (row["n_prompt"] == 0)
        if row["n_gen"] == 0:  # the same times: cut off alike
            assert (row["ttft_ns"], row["samples_ttft_ns"]) == (row["avg_ns"], times)
        assert (row["token_p50_ns"] is None) == (row["n_gen"] == 0)
        # memory by phase
        assert 0 < row["base_bytes"] <= row["load_resident_bytes"]
        assert row["load_device_bytes"] is None
        assert row["estimated_memory_bytes"] is None
    reading, writing, _ = found
    assert reading["prefill_resident_bytes"] > 0
    assert reading["decode_resident_bytes"] is None
    assert writing["decode_resident_bytes"] > 0


def test_lines_values_and_tables(bench: Callable[..., Any]) -> None:
    lines = bench("-o", "jsonl").out.splitlines()
    assert [json.loads(line)["n_prompt"] for line in lines] == [8, 0]
    text = bench("-o", "csv").out
    assert text.splitlines()[0].split(",")[: len(NAMES)] == PUBLISHED
    assert text.splitlines()[1].startswith('"')
    table = list(csv.DictReader(io.StringIO(text)))
    assert [row["n_gen"] for row in table] == ["0", "3"]
    assert re.fullmatch(r"\d+\.\d{6}", table[0]["avg_ts"])
    base = sqlite3.connect(":memory:")
    for _ in range(2):  # what is in the tables stays
        base.executescript(bench("-o", "sql").out)
    found = base.execute(
        "SELECT n_prompt, n_gen, avg_ts > 0, engine, ttft_ns IS NULL FROM llama_bench "
        "JOIN llmcli_bench ON llama_bench.rowid = llama_bench_rowid"
    ).fetchall()
    assert found == [(8, 0, 1, "llmcli", 0), (0, 3, 1, "llmcli", 1)] * 2


@pytest.mark.parametrize(
    ("format", "first"),
    [("md", "pp8"), ("csv", '"8"'), ("json", '"n_prompt": 8'), ("jsonl", '"n_prompt": 8'),
     ("sql", "INSERT INTO")],
)  # fmt: skip
def test_rows_are_written_as_they_are_measured(folder: str, format: str, first: str) -> None:
    """A pipe has each before the next one begins."""
    argv = [sys.executable, "-m", "llmcli", "bench", "-m", folder, "-p", "8", "-n", "3", "-r", "1"]
    argv += ["--dtype", "float32", "-t", "1", "--no-ceilings", "--progress", "-o", format]
    both = subprocess.PIPE
    said = children.run(argv, stdout=both, stderr=subprocess.STDOUT, text=True, timeout=60).stdout
    before, second = said.split("benchmark 2/2: starting")
    assert first in before.split("benchmark 1/1: prompt run 1/1")[-1]
    assert "tg3" in second or '"n_gen": 3' in second or '"3"' in second or "INSERT" in second


def test_a_row_that_could_not_run_has_every_field(bench: Callable[..., Any]) -> None:
    found = rows(bench("-ctk", "q8_0,auto", "-o", "json"))
    assert not [name for row in found for name in NAMES if row[name] is None]
    assert (found[0]["avg_ts"], found[0]["avg_ns"], found[0]["samples_ns"]) == (0, 0, [])
    assert bench("-ctk", "q8_0,auto", "-o", "csv").out.count("has no kernel") == 2


@pytest.mark.parametrize("format", ["json", "csv", "md", "--json"])
def test_an_interruption_keeps_what_was_measured(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    def interrupted(self: Ours, id: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Ours, "step", interrupted)  # the first test has none
    result = bench(*([format] if format == "--json" else ["-o", format]))
    assert result.code == 130
    assert result.err == "interrupted after 1 test\n"
    if format == "json":
        assert [row["n_prompt"] for row in json.loads(result.out)] == [8]
    elif format == "--json":
        found = result.json()
        assert (found["interrupted"], len(found["rows"])) == (True, 1)
        assert found["finish_reason"] == "interrupted"
    elif format == "csv":
        assert len(result.out.splitlines()) == 2
    else:
        assert "pp8" in result.out.split("\nbuild: ")[0]


@pytest.mark.parametrize("place", ["find", "open_checkpoint"])
def test_an_array_without_a_row_is_one(
    cli: Callable[..., Any], folder: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    module = "llmcli.checkpoints" + (".locate" if place == "find" else "")
    monkeypatch.setattr(import_module(module), place, interrupted)
    model = [] if place == "find" else ["-m", folder]
    result = cli("bench", *model, "-p", "8", "-n", "0", "-o", "json")
    assert (result.code, result.out) == (130, "[]\n")


@pytest.mark.skipif(native.level() is None, reason="there are no kernels here")
def test_a_quantization_without_effect_is_said_once_a_model(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    narrow = write_tiny(tmp_path / "narrow", weights=True, hidden_size=16)
    more = ("-p", "4,8", "-n", "0", "-t", "1,2", "-o", "none", "--dtype", "auto")
    result = bench("-m", str(narrow), "--quantize", "int8", *more)
    assert (result.code, result.err.count("`--quantize int8` has no effect: ")) == (0, 1)


@pytest.mark.skipif(native.level() is None, reason="there are no kernels here")
def test_packed_weights_say_what_is_multiplied_and_kept(bench: Callable[..., Any]) -> None:
    packed = bench("--quantize", "int8", "--dtype", "auto", "-o", "json")
    for row in rows(packed):
        assert row["weight_format"].startswith("Q8_0")
        assert (row["product_format"], row["dtype"]) == ("int16", "float32")
        assert (row["type_k"], row["type_v"]) == ("f16", "f16")
        assert row["bits_per_weight"] < 16
        assert " Q8_0" in row["model_type"]
    (dense, *_) = rows(bench("-o", "json"))
    assert (dense["weight_format"], dense["product_format"]) == ("float32", "float32")
    assert rows(packed)[0]["model_size"] < dense["model_size"] / 2


def test_what_is_looked_for(
    cli: Callable[..., Any], bench: Callable[..., Any], folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A revision is one of the hub; nothing is fetched for a row that cannot run."""
    asked: list[Any] = []
    locate = import_module("llmcli.checkpoints.locate")  # a function has its name, too
    find = locate.find

    def found(spec: str | None, *, revision: Any = None, offline: bool = False, **_: Any) -> Any:
        asked.append((revision, offline))
        return find(spec)

    monkeypatch.setattr(locate, "find", found)
    argv = ("--revision", "v2", "-p", "4", "-n", "0", "-o", "none")
    assert bench(*argv).code == 0
    result = bench("-ctk", "q8_0", "-o", "json")
    assert (result.code, asked) == (2, [("v2", False), (None, True)])
    assert all(row["model_n_params"] > 0 for row in json.loads(result.out))


def test_random_weights_are_said(bench: Callable[..., Any]) -> None:
    assert "random weights (seed 7) · base " in bench("--random-weights", "--seed", "7").out
    assert "random weights" not in bench().out


def test_the_document(bench: Callable[..., Any], folder: str) -> None:
    found = bench("--json", "--dtype", "float32,float64").json()
    assert [model["weight_format"] for model in found["models"]] == ["float32", "float64"]
    assert found["model"] == found["models"][0]
    assert [row["number"] for row in found["rows"]] == [1, 2, 3, 4]
    assert len(found["rows"][1]["samples_token_ns"]) == 3 * 2
    assert found["environment"]["processor"]
    assert (found["ceilings"], found["finish_reason"]) == ([], "complete")


def test_ceilings_give_the_share_of_the_roofline(cli: Callable[..., Any], folder: str) -> None:
    found = cli("bench", "-m", folder, "-p", "16", "-n", "0", "-r", "2", "--json").json()
    (row,) = found["rows"]
    (ceilings,) = found["ceilings"]
    assert ceilings["reads"]
    assert 0 < row["roofline_share"] < 1
    # six decimals, of which a run beside a busy program leaves few; both times are whole ns
    share = row["roofline_ns"] / row["avg_ns"]
    off = 6e-7 + share * (0.5 / row["roofline_ns"] + 0.5 / row["avg_ns"])
    assert row["roofline_share"] == pytest.approx(share, rel=0, abs=off)


def test_a_loaded_machine_is_said(
    bench: Callable[..., Any], others_take: Callable[[float], None]
) -> None:
    assert bench("-o", "json").err == ""
    others_take(1.9)
    words = "note: other programs took 1.90 of 2 processors: on an idle machine this is faster\n"
    for argv in (("-o", "json"), ("-o", "md"), ("--json",)):
        assert bench(*argv).err == words
    load = bench("--json").json()["machine_load"]
    assert (load["threads"], load["others"], load["slowed"]) == (1, 1.9, True)
    others_take(0.9)  # and the one thread has the other processor
    assert bench("-o", "json").err == ""


def test_verbose(bench: Callable[..., Any], cli: Callable[..., Any], folder: str) -> None:
    first, second = bench("-v").err.splitlines()
    assert re.fullmatch(r"note: .+, torch [^,]+, 1 thread, .+", first)
    assert re.fullmatch(rf"note: loaded {folder} in [\d.e-]+ s: float32 on cpu", second)
    ceilings = cli("bench", "-m", folder, "-p", "4", "-n", "0", "-v", "-o", "none").err
    assert re.search(r"\nnote: ceilings \(cpu, \w+\): memory .+B/s, .+FLOP/s", ceilings)
    assert bench("-v", "--quiet").err == ""


def test_the_program_is_named_by_its_version_where_it_is_no_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by = ending.bencher()
    assert re.fullmatch(r"[0-9a-f]{8}", by.build_commit) or by.build_number == 0
    monkeypatch.setattr(ending, "_git", lambda root, *words: "")
    by = ending.bencher()
    assert (by.build_commit, by.build_number) == (llmcli.__version__, 0)


def test_the_environment_is_once_in_a_document_and_never_in_a_stream(
    bench: Callable[..., Any],
) -> None:
    """Rows keep llama-bench's own fields of the machine, which its readers look for."""
    argv = ("-p", "2,3", "-n", "0")
    document = bench(*argv, "--json")
    assert document.out.count('"environment"') == 1
    assert document.json()["environment"]["torch"]
    lines = [json.loads(line) for line in bench(*argv, "-o", "jsonl").out.splitlines()]
    assert len(lines) == 2
    for row in (*lines, *document.json()["rows"]):
        assert "environment" not in row
        assert {"cpu_info", "gpu_info", "backends", "build_commit"} <= set(row)
