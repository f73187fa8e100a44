"""llama-bench's results in each of its formats, and files that are none."""

from __future__ import annotations

import json
import sqlite3
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev

import pytest

from llmcli.commands.bench.measure.compare import COMPARED, read_results
from llmcli.commands.bench.report.comparison import Source
from llmcli.errors import UsageError

DATA = Path(__file__).parents[2] / "data" / "llama_bench"
FORMATS = {"json": "JSON", "jsonl": "JSONL", "csv": "CSV"}
# nanoseconds of the runs in those files, and tokens of each
RUNS = {
    "pp512": (512, [640e6, 655e6, 648e6, 642e6, 650e6]),
    "tg128": (128, [1280e6, 1300e6, 1290e6, 1275e6, 1310e6]),
    "pp512+tg128 @ d1024": (640, [2000e6, 2040e6, 2010e6, 2100e6, 1990e6]),
}


def read(kind: str) -> Source:
    return read_results((DATA / f"results.{kind}").read_bytes(), kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_results_from_every_format(kind: str) -> None:
    found = read(kind)
    assert (found.name, found.format, found.builds) == (kind, FORMATS[kind], ("1a2b3c4d (6001)",))
    assert [row.test for row in found.results] == list(RUNS)
    digits = {"json": 1e-12, "jsonl": 1e-12, "csv": 1e-6}[kind]
    for row, (tokens, times) in zip(found.results, RUNS.values(), strict=True):
        rates = [tokens / (ns / 1e9) for ns in times]
        assert row.rate is not None
        assert row.error is None
        assert row.rate.mean == pytest.approx(fmean(rates), abs=digits)
        assert row.rate.std == pytest.approx(stdev(rates), abs=digits)
        assert row.rate.runs == (5 if kind.startswith("json") else None)


@pytest.mark.parametrize("kind", FORMATS)
def test_settings_are_spelled_alike(kind: str) -> None:
    facts, whole = read(kind).results[0].facts, read("json").results[0].facts
    assert facts == whole
    assert (facts["model_size"], facts["model_n_params"]) == ("87.00 MiB", "134.52 M")
    assert facts["model_filename"] == "small-135M-Q4_1.gguf"
    assert (facts["use_mmap"], facts["embeddings"]) == ("1", "0")
    assert facts["cpu_info"] == 'Example CPU "8-core" @ 3.00GHz'


@pytest.mark.parametrize("cut", [None, 40])
@pytest.mark.parametrize("database", [False, True])
def test_sql_is_refused_with_the_way_out(database: bool, cut: int | None) -> None:
    """What `-o sql` writes, a dump of it, and the database made from it: nothing of it runs."""
    text = (DATA / "results.sql").read_text()
    with sqlite3.connect(":memory:") as base:
        base.executescript(text)
        data = base.serialize() if database else "\n".join(base.iterdump()).encode()
    for refused in (data[:cut], text.encode()):
        with pytest.raises(UsageError, match="`x` is SQL, which `bench compare` does not ") as told:
            read_results(refused, "x")
        assert told.value.hint is not None
        assert "`-o json`" in told.value.hint


@pytest.mark.parametrize("kind", FORMATS)
def test_runs_that_stand_one_after_the_other(kind: str) -> None:
    once = (DATA / f"results.{kind}").read_bytes()
    assert read_results(once + b"\n" + once, "twice").rows == 6


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_what_windows_writes(kind: str) -> None:
    text = (DATA / f"results.{kind}").read_text("utf-8").replace("\n", "\r\n")
    assert read_results(text.encode("utf-8-sig"), kind).results == read(kind).results


# files that are none

# more of them are in transcripts/bench-compare-refused.txt
CUT = "is cut off"
WRONG: dict[str, tuple[bytes, str]] = {
    "a picture": (b"\x89PNG\r\n\x1a\n\x00", "is no text (byte 0)"),
    "cut JSON": ((DATA / "results.json").read_bytes()[:-700], CUT),
    "cut in a word": ((DATA / "results.json").read_bytes()[:700], CUT),
    "cut JSONL": ((DATA / "results.jsonl").read_bytes()[:-20], "line 3 of `x`"),
    "cut CSV": ((DATA / "results.csv").read_bytes()[:-200], "line 4 of `x`"),
    "Markdown": ((DATA / "results.md").read_bytes(), "only JSON, JSONL and CSV can be compared"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "digits": (b'[{"n_prompt": ' + b"1" * 9000 + b"}]", "is not JSON: it has a number of"),
}


@pytest.mark.parametrize(("data", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_result_is_one_line(data: bytes, words: str) -> None:
    with pytest.raises(UsageError) as error:
        read_results(data, "x")
    assert words in error.value.message
    assert "\n" not in error.value.message
    assert error.value.hint
    assert len(error.value.message) < 200


@pytest.mark.parametrize("kind", FORMATS)
def test_no_cut_makes_a_traceback(kind: str) -> None:
    data = (DATA / f"results.{kind}").read_bytes()
    whole = read_results(data, "x").rows
    for end in range(0, len(data), 37):
        with suppress(UsageError):
            assert read_results(data[:end], "x").rows <= whole


def test_settings_hold_every_field_of_llama_bench_that_is_one() -> None:
    measured = {"build_commit", "build_number", "n_prompt", "n_gen", "n_depth", "test_time"}
    measured |= {"avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts"}
    (first, *_) = json.loads((DATA / "results.json").read_text())
    assert set(first) - measured <= set(COMPARED)
