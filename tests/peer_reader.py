"""A program that reads llama-bench's results, as others have written them: it knows nothing of us.

The fields are those that llama-bench publishes, and what is asked of them is what llama.cpp's own
comparison script asks: the fields that it needs, typed columns, and a self-join on the fields that
make two rows the same test, where a NULL is equal to nothing.
"""

import csv
import io
import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

TEXT, INTEGER, REAL = "TEXT", "INTEGER", "REAL"
FIELDS: dict[str, str] = {
    "build_commit": TEXT, "build_number": INTEGER, "cpu_info": TEXT, "gpu_info": TEXT,
    "backends": TEXT, "model_filename": TEXT, "model_type": TEXT, "model_size": INTEGER,
    "model_n_params": INTEGER, "n_batch": INTEGER, "n_ubatch": INTEGER, "n_threads": INTEGER,
    "cpu_mask": TEXT, "cpu_strict": INTEGER, "poll": INTEGER, "type_k": TEXT, "type_v": TEXT,
    "n_gpu_layers": INTEGER, "n_cpu_moe": INTEGER, "split_mode": TEXT, "main_gpu": INTEGER,
    "no_kv_offload": INTEGER, "flash_attn": INTEGER, "devices": TEXT, "tensor_split": TEXT,
    "tensor_buft_overrides": TEXT, "use_mmap": INTEGER, "embeddings": INTEGER,
    "no_op_offload": INTEGER, "no_host": INTEGER, "n_prompt": INTEGER, "n_gen": INTEGER,
    "n_depth": INTEGER, "test_time": TEXT, "avg_ns": INTEGER, "stddev_ns": INTEGER,
    "avg_ts": REAL, "stddev_ts": REAL,
}  # fmt: skip
BOOLEANS = {"cpu_strict", "no_kv_offload", "use_mmap", "embeddings", "no_host"}
# two rows are the same test where these are equal
SAME = (
    "cpu_info", "gpu_info", "backends", "n_gpu_layers", "tensor_buft_overrides", "model_filename",
    "model_type", "n_batch", "n_ubatch", "embeddings", "cpu_mask", "cpu_strict", "poll",
    "n_threads", "type_k", "type_v", "use_mmap", "no_kv_offload", "split_mode", "main_gpu",
    "tensor_split", "flash_attn", "n_prompt", "n_gen", "n_depth",
)  # fmt: skip
NEEDED = {*SAME, "build_commit", "test_time", "avg_ts"}


def from_json(text: str) -> sqlite3.Connection:
    return _filled(json.loads(text))


def from_jsonl(text: str) -> sqlite3.Connection:
    return _filled(json.loads(line) for line in text.splitlines())


def from_csv(text: str) -> sqlite3.Connection:
    return _filled(csv.DictReader(io.StringIO(text)))


def from_sql(text: str) -> sqlite3.Connection:
    """What `llama-bench -o sql | sqlite3 file` makes."""
    base = sqlite3.connect(":memory:")
    base.executescript(text)
    return base


def from_markdown(text: str) -> list[dict[str, str]]:
    """The first table: a dictionary for each line, by its headings."""
    lines = text.split("\n")
    heading, _, *rest = (
        [cell.strip() for cell in line[1:-1].split("|")] for line in lines[: lines.index("")]
    )
    return [dict(zip(heading, cells, strict=True)) for cells in rest]


def _filled(rows: Iterable[Mapping[str, Any]]) -> sqlite3.Connection:
    base = sqlite3.connect(":memory:")
    columns = ", ".join(f"{field} {kind}" for field, kind in FIELDS.items())
    base.execute(f"CREATE TABLE llama_bench ({columns})")
    for row in rows:
        known = {field: value for field, value in row.items() if field in FIELDS}
        missing = NEEDED - known.keys()
        if missing:
            raise KeyError(f"missing: {sorted(missing)}")
        marks = ", ".join("?" * len(known))
        names = ", ".join(known)
        base.execute(f"INSERT INTO llama_bench ({names}) VALUES ({marks})", [*known.values()])
    return base


def paired(base: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """(n_prompt, n_gen, n_depth, rate) of each test that is the same as one: itself at least."""
    equal = " AND ".join(f"a.{field} = b.{field}" for field in SAME)
    return base.execute(
        "SELECT a.n_prompt, a.n_gen, a.n_depth, AVG(b.avg_ts) FROM llama_bench a "
        f"JOIN llama_bench b ON {equal} AND a.build_commit = b.build_commit "
        "GROUP BY a.rowid ORDER BY a.rowid"
    ).fetchall()


def mistyped(base: sqlite3.Connection) -> list[tuple[str, str]]:
    """(field, what it is) wherever a value is not of its field's type."""
    found = []
    for field, kind in FIELDS.items():
        for (name,) in base.execute(f"SELECT DISTINCT typeof({field}) FROM llama_bench"):
            if name.upper() != kind:
                found.append((field, name))
    return found
