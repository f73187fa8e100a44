"""Rows as llama-bench writes them: CSV, JSON, JSON lines, SQL and Markdown, byte for byte."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.commands.bench.report.row import (
    KEYS,
    KINDS,
    OURS,
    THEIRS,
    BuildInfo,
    Row,
    count_words,
    size_words,
)
from llmcli.commands.bench.report.settings import COLUMNS, SETTINGS, Settings
from llmcli.ui.theme import csv_cell, encodable, one_line


@dataclass(frozen=True, kw_only=True)
class Format:
    """The text before the first row, of each row, and after the last of so many rows.

    The output of an interrupted run is valid, too, once `foot` is written.
    """

    head: str
    row: Callable[[Row], str]
    foot: Callable[[int], str] = lambda rows: ""


def plain(row: Row, name: str) -> str:
    """A value as llama-bench writes it in text: flags 0 and 1, reals with 6 decimals.

    Texts are on one line, with control characters spelled out. Empty where there is none, which
    only a field of ours can be.
    """
    value = getattr(row, name)
    if value is None:
        return ""
    if KINDS[name] == "float":
        return f"{value:.6f}"
    return str(int(value)) if isinstance(value, bool) else one_line(str(value))


def _csv_row(row: Row) -> str:
    """A quote in a value is doubled."""
    cells = []
    for name in (*THEIRS, *OURS):
        value = getattr(row, name)
        cell = csv_cell(value) if isinstance(value, str) else plain(row, name)
        cells.append('"' + cell.replace('"', '""') + '"')
    return ",".join(cells) + "\n"


CSV = Format(head=",".join((*THEIRS, *OURS)) + "\n", row=_csv_row)


def row_object(row: Row, keys: Collection[str] = KEYS) -> dict[str, Any]:
    """These keys of a row; reals have 6 decimals, which is what llama-bench writes."""
    return {name: _jsonable(getattr(row, name)) for name in keys}


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def _json_row(row: Row) -> str:
    """One element, with the comma before it."""
    found = row_object(row).items()
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in found)
    return ("\n" if row.number == 1 else ",\n") + "  {\n" + lines + "\n  }"


JSON = Format(head="[", row=_json_row, foot=lambda rows: "\n]\n" if rows else "]\n")
JSON_LINES = Format(head="", row=lambda row: json.dumps(row_object(row)) + "\n")

TABLE, BESIDE = "llama_bench", "llmcli_bench"
# which row of the other table it belongs to: that table has no key, but a number SQLite gives it
_NUMBER = "llama_bench_rowid"
_TYPES = {"str": "TEXT", "int": "INTEGER", "bool": "INTEGER", "float": "REAL"}


def _create(table: str, names: Sequence[str], *first: str) -> str:
    columns = [*first, *(f"  {name} {_TYPES[KINDS[name]]}" for name in names)]
    return f"CREATE TABLE IF NOT EXISTS {table} (\n" + ",\n".join(columns) + "\n);\n\n"


def _sql_row(row: Row) -> str:
    """One INSERT into each table."""
    theirs, ours = (", ".join(_quoted(row, name) for name in names) for names in (THEIRS, OURS))
    return (
        f"INSERT INTO {TABLE} ({', '.join(THEIRS)}) VALUES ({theirs});\n"
        f"INSERT INTO {BESIDE} ({_NUMBER}, {', '.join(OURS)}) "
        f"VALUES (last_insert_rowid(), {ours});\n"
    )


def _quoted(row: Row, name: str) -> str:
    """Every value in quotes, as llama-bench writes it; NULL where one of ours is missing."""
    if getattr(row, name) is None:
        return "NULL"
    return "'" + plain(row, name).replace("'", "''") + "'"


SQL = Format(
    head=_create(TABLE, THEIRS) + _create(BESIDE, OURS, f"  {_NUMBER} INTEGER"), row=_sql_row
)
NONE = Format(head="", row=lambda row: "")
FORMATS = {"csv": CSV, "json": JSON, "jsonl": JSON_LINES, "sql": SQL, "none": NONE}


def rate(row: Row) -> str:
    """`12.34 ± 0.56`, or why there is none."""
    if row.error is not None:
        return f"error: {row.error}"
    return f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}" if row.runs else "not run"


# columns of the Markdown table beside fields of a row: the width of a cell, below 0 if aligned
# left, and its text
_COLUMNS: dict[str, tuple[int, Callable[[Row], str]]] = {
    "model": (-30, lambda row: plain(row, "model_type")),
    "size": (10, lambda row: size_words(row.model_size) if row.model_size else ""),
    "params": (10, lambda row: count_words(row.model_n_params) if row.model_n_params else ""),
    "backend": (-10, lambda row: plain(row, "backends")),
    "engine": (-12, lambda row: plain(row, "engine")),
    "test": (15, lambda row: row.test.name),
    "t/s": (20, rate),
}
_BOTH = -17  # `CUDA,transformers`
# settings whose columns are shown where they vary or were given, in llama-bench's order
_OPTIONAL = (
    "n_threads", "n_batch", "n_ubatch", "type_k", "type_v", "no_kv_offload", "flash_attn",
    "device", "embeddings", "dtype", "activations",
)  # fmt: skip
# Where llama-bench's table is wider than the terminal: narrower cells, and columns that go, in
# this order, before those that are the same in every row
_NARROW = {"model": -16, "test": 10, "t/s": 16}
_DROP = ("params", "size", "backend")


def table_widths(
    configurations: Sequence[Settings], default: Settings, *, gpu: bool, cpu: bool,
    engines: bool = False, room: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """The columns of the Markdown table that there is room for, with the width of their cells.

    `default`: what each option is where none is given. `gpu`: some configurations run on one;
    `cpu`: some do not. `engines`: more than ours. `room`: the columns of the terminal, None where
    the table has llama-bench's width.
    """

    def values(name: str) -> set[Any]:
        return {getattr(settings, name) for settings in configurations}

    names = ["model", "size", "params", "backend", *(["n_gpu_layers"] if gpu else [])]
    names += [
        SETTINGS[name].column
        for name in _OPTIONAL
        if values(name) != {getattr(default, name)} or (name == "n_threads" and cpu)
    ]
    found = {name: _width(name) for name in (*names, *["engine"] * engines, "test", "t/s")}
    if engines:
        found["backend"] = _BOTH  # named with a peer's engine
    if room is None or _total(found) <= room:
        return found
    found = {name: _NARROW.get(name, width) for name, width in found.items()}
    columns = {name: SETTINGS[name].column for name in (*_OPTIONAL, "n_gpu_layers")}
    columns["model"] = "model"
    alike = [column for name, column in columns.items() if len(values(name)) == 1]
    for name in (*_DROP, *alike):
        if _total(found) > room:
            found.pop(name, None)
    return found


def markdown(build: BuildInfo, widths: Mapping[str, int]) -> Format:
    """The table to the character, and `build: …` below it. `widths`: see `table_widths`."""
    lines = ["-" * (abs(width) - 1) + (":" if width > 0 else "-") for width in widths.values()]
    return Format(
        head=_line([_cell(_heading(name), width) for name, width in widths.items()]) + _line(lines),
        row=lambda row: _line([_cell(_text(row, name), w) for name, w in widths.items()]),
        foot=lambda rows: f"\nbuild: {build.build_commit} ({build.build_number})\n",
    )


def _heading(name: str) -> str:
    return COLUMNS[name].heading if name in COLUMNS else name


def _text(row: Row, name: str) -> str:
    return _COLUMNS[name][1](row) if name in _COLUMNS else plain(row, name)


def _cell(text: str, width: int) -> str:
    """A bar in it would begin the next cell, and a line break the next row."""
    text = one_line(text).replace("|", "\\|")
    return f"{text:<{-width}}" if width < 0 else f"{text:>{width}}"


def _width(name: str) -> int:
    if name in _COLUMNS:
        return _COLUMNS[name][0]
    return COLUMNS[name].width or max(len(name), 10) * (-1 if KINDS[name] == "str" else 1)


def _total(widths: Mapping[str, int]) -> int:
    """Columns of a line with its bars."""
    return sum(abs(width) + 3 for width in widths.values()) + 1


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"
