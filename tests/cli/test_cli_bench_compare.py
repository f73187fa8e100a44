"""`bench compare` as a user runs it: files in, a table or a document out, an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import children
import peer_reader as peer
import pytest

from llmcli.cli.app import main

DATA = Path(__file__).parents[1] / "data" / "llama_bench"
BEFORE = str(DATA / "results.json")
Cli = Callable[..., Any]


def test_an_endless_file_is_not_read_to_its_end(cli: Cli) -> None:
    result = cli("bench", "compare", BEFORE, "/dev/zero")
    assert (result.code, "too large" in result.err) == (2, True)


def test_utf_16_is_named(cli: Cli, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    wide.write_text(Path(BEFORE).read_text("utf-8"), "utf-16")
    result = cli("bench", "compare", BEFORE, str(wide))
    assert result.code == 2
    assert f"`{wide}` is UTF-16 text, not UTF-8" in " ".join(result.err.split())


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


# a real run of ours


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `bench` writes in every format."""
    folder = tmp_path_factory.mktemp("ours")
    argv = ["bench", "-m", "tiny", "-p", "4", "-n", "2", "-t", "1", "-r", "3", "--no-ceilings"]
    files = {kind: str(folder / kind) for kind in ("json", "jsonl", "csv", "sql", "md", "document")}
    for kind, path in files.items():
        out = ["--json"] if kind == "document" else ["-o", kind]
        with open(path, "w", encoding="utf-8") as file, redirect_stdout(file):
            assert main([*argv, *out]) == 0
    return files


@pytest.mark.parametrize("kind", ["jsonl", "csv", "document"])
def test_our_own_results_in_every_format(cli: Cli, ours: dict[str, str], kind: str) -> None:
    said = cli("bench", "compare", ours["json"], ours[kind], "--json").json()
    assert [test["test"] for test in said["tests"]] == ["pp4", "tg2"]
    assert said["lone"] == said["differences"] == []
    for test in said["tests"]:
        assert test["a"]["runs"] == test["b"]["runs"] == 3
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
