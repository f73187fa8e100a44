"""A program that reads llama-bench's results, as others have written them: it knows nothing of us.

The fields are those of llama-bench's own files in data/llama_bench, and what is asked of them is
what llama.cpp's own comparison script asks: the fields that it needs, typed columns, and a
self-join on the fields that make two rows the same test, where a NULL is equal to nothing.
"""

import csv
import io
import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "llama_bench"
TABLE = (DATA / "results.sql").read_text("utf-8").partition(";")[0]
# name and type of each column
FIELDS = dict(re.findall(r"(\w+) (TEXT|INTEGER|REAL)\b", TABLE))
BOOLEANS = {
    field for field, value in json.loads((DATA / "results.json").read_text("utf-8"))[0].items()
    if isinstance(value, bool)
}  # fmt: skip
# two rows are the same test where these are equal
SAME = (
    "cpu_info", "gpu_info", "backends", "n_gpu_layers", "tensor_buft_overrides", "model_filename",
    "model_type", "n_batch", "n_ubatch", "embeddings", "cpu_mask", "cpu_strict", "poll",
    "n_threads", "type_k", "type_v", "use_mmap", "no_kv_offload", "split_mode", "main_gpu",
    "tensor_split", "flash_attn", "n_prompt", "n_gen", "n_depth",
)  # fmt: skip
ROWS: dict[str, Callable[[str], Iterable[Mapping[str, Any]]]] = {
    "json": json.loads, "jsonl": lambda text: map(json.loads, text.splitlines()),
    "csv": lambda text: csv.DictReader(io.StringIO(text)), "sql": lambda text: (),
}  # fmt: skip
NEEDED = {*SAME, "build_commit", "test_time", "avg_ts"}


def read(kind: str, text: str) -> sqlite3.Connection:
    """The table that `-o KIND` gives: of SQL what `| sqlite3 file` makes."""
    base = sqlite3.connect(":memory:")
    base.executescript(text if kind == "sql" else TABLE)
    for row in ROWS[kind](text):
        known = {field: value for field, value in row.items() if field in FIELDS}
        if missing := NEEDED - known.keys():
            raise KeyError(f"missing: {sorted(missing)}")
        marks = ", ".join("?" * len(known))
        names = ", ".join(known)
        base.execute(f"INSERT INTO llama_bench ({names}) VALUES ({marks})", [*known.values()])
    return base


def from_markdown(text: str) -> list[dict[str, str]]:
    """The first table: a dictionary for each line, by its headings."""
    lines = text.split("\n")
    table = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[: lines.index("")]]
    return [dict(zip(table[0], cells, strict=True)) for cells in table[2:]]


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
    return [
        (field, name)
        for field, kind in FIELDS.items()
        for (name,) in base.execute(f"SELECT DISTINCT typeof({field}) FROM llama_bench")
        if name.upper() != kind
    ]
