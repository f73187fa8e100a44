"""What reads llama-bench's results reads ours: JSON, JSONL, CSV and SQL.

Rows made by hand go through our writers, and come back through a reader that knows llama-bench
only (`peer_reader`). Their bytes are in transcripts/bench-formats.txt.
"""

from __future__ import annotations

import json
import re
import sqlite3
from dataclasses import replace
from typing import Any

import peer_reader as peer
import pytest

from llmcli.commands.bench.report.plan import Test as Counts
from llmcli.commands.bench.report.row import BuildInfo, EngineInfo, Row, Run
from llmcli.commands.bench.report.settings import Settings
from llmcli.commands.bench.view.formats import FORMATS
from llmcli.errors import OutOfMemory

BY = BuildInfo(build_commit="abc1234", build_number=12, cpu_info='A "fast" CPU, 2 GHz', gpu_info="")
SETTINGS = Settings(
    model="it's a model", device="cpu", dtype="float32", n_threads=2, type_k="f16", type_v="f16"
)
RAN = EngineInfo(
    engine="llmcli", engine_version="0.1.0", model_type="llama 135M F32", model_size=538_060_032,
    model_n_params=134_515_008, backends="CPU", device="cpu", dtype="float32",
    weight_format="float32", product_format="float32", type_k="f32", gpu_layers=0, load_s=0.5,
)  # fmt: skip
TIME = "2026-11-22T10:00:00Z"


def prompt(*seconds: float) -> list[Run]:
    return [Run(total=int(s * 1e9), first=int(s * 1e9)) for s in seconds]


READING = Row.of(1, SETTINGS, Counts(n_prompt=512, n_gen=0), RAN, BY, TIME, prompt(1, 2, 4))
TEXT = Counts(n_prompt=0, n_gen=100, n_depth=1024)
TOKENS = Run(total=1_000_000_000, tokens=(10_000_000,) * 100)
WRITING = Row.of(2, SETTINGS, TEXT, RAN, BY, TIME, [TOKENS])
FOUR = replace(SETTINGS, n_threads=4)
FAILED = Row.of(
    3, FOUR, TEXT, EngineInfo.unknown("llmcli", FOUR), BY, TIME,
    error=OutOfMemory("it does not fit: 'a' \"b\" | c"),
)  # fmt: skip
ROWS = (READING, WRITING, FAILED)
# 512, 256 and 128 tokens a second: their mean is not that of 1536 tokens in 7 seconds
MEAN = (512 + 256 + 128) / 3
STD = (((512 - MEAN) ** 2 + (256 - MEAN) ** 2 + (128 - MEAN) ** 2) / (3 - 1)) ** 0.5
TABLES = {
    "json": peer.from_json, "jsonl": peer.from_jsonl, "csv": peer.from_csv, "sql": peer.from_sql,
}  # fmt: skip


def written(kind: str, *rows: Row) -> str:
    found = FORMATS[kind]
    return found.head + "".join(map(found.row, rows)) + found.foot(len(rows))


@pytest.mark.parametrize("kind", TABLES)
def test_a_program_that_reads_llama_bench_reads_us(kind: str) -> None:
    base = TABLES[kind](written(kind, *ROWS))
    found = peer.paired(base)
    assert [row[:3] for row in found] == [(512, 0, 0), (0, 100, 1024), (0, 100, 1024)]
    assert [row[3] for row in found] == pytest.approx([MEAN, 100.0, 0.0], abs=1e-6)
    assert peer.mistyped(base) == []
    row = base.execute("SELECT * FROM llama_bench")
    first = dict(zip([name[0] for name in row.description], row.fetchone(), strict=True))
    assert first["avg_ns"] == 7_000_000_000 // 3
    assert first["stddev_ts"] == pytest.approx(STD, abs=1e-6)
    assert (first["model_size"], first["model_n_params"]) == (538_060_032, 134_515_008)
    assert (first["cpu_info"], first["model_filename"]) == (BY.cpu_info, "it's a model")
    assert (first["use_mmap"], first["embeddings"], first["flash_attn"]) == (1, 0, -1)


@pytest.mark.parametrize("kind", TABLES)
def test_that_reader_can_fail(kind: str) -> None:
    text = written(kind, *ROWS)
    with pytest.raises((KeyError, sqlite3.Error)):
        peer.paired(TABLES[kind](text.replace("type_k", "kind_k")))
    much = '"much"' if kind.startswith("json") else "much"
    wrong = peer.mistyped(TABLES[kind](text.replace("538060032", much)))
    assert wrong == [("model_size", "text")]


def test_a_null_would_be_lost_in_the_join() -> None:
    text = written("jsonl", READING).replace('"A \\"fast\\" CPU, 2 GHz"', "null")
    assert peer.paired(peer.from_jsonl(text)) == []


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_keys_types_and_order_of_json(kind: str) -> None:
    text = written(kind, *ROWS)
    rows: list[dict[str, Any]] = (
        json.loads(text) if kind == "json" else [json.loads(line) for line in text.splitlines()]
    )
    names = [*peer.FIELDS, "samples_ns", "samples_ts"]
    for row in rows:
        assert list(row)[: len(names)] == names
        for name, sql in peer.FIELDS.items():
            is_text = sql == peer.TEXT
            assert isinstance(row[name], str) is is_text, name
            assert isinstance(row[name], bool) is (name in peer.BOOLEANS), name
    assert rows[0]["samples_ns"] == list(READING.samples_ns)
    assert rows[0]["samples_ts"] == [512.0, 256.0, 128.0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", rows[0]["test_time"])


def test_columns_of_sql() -> None:
    base = peer.from_sql(written("sql", *ROWS))
    columns = base.execute("PRAGMA table_info(llama_bench)").fetchall()
    assert {name: kind for _, name, kind, *_ in columns} == peer.FIELDS
    text = written("sql", *ROWS)
    base.executescript(text)
    assert len(base.execute("SELECT * FROM llama_bench").fetchall()) == 6, "into one that is there"
    told = base.execute(
        "SELECT n_gen, runs, error_code FROM llama_bench a "
        "JOIN llmcli_bench b ON a.rowid = b.llama_bench_rowid"
    ).fetchall()
    assert told == [(0, 3, None), (100, 1, None), (100, 0, 5)] * 2
