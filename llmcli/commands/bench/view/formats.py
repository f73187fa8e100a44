"""Rows as CSV, JSON, JSON lines and SQL, each as llama-bench writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from llmcli.commands.bench.report.fields import (
    FIELDS,
    OUR_SAMPLES,
    OURS,
    SAMPLES,
    BuildInfo,
    Field,
    Value,
)
from llmcli.commands.bench.report.results import BenchRow
from llmcli.ui.theme import csv_cell, encodable, one_line


class Writer(Protocol):
    """Text for one stream. `header`, then `row` for each, then `footer`, whatever happened."""

    def header(self) -> str:
        """What comes before the first row is measured."""

    def row(self, row: BenchRow) -> str:
        """One row, whole lines of it or what ends in an unfinished one."""

    def footer(self) -> str:
        """What closes it."""


def plain(field: Field, value: Value) -> str:
    """A value as llama-bench writes it in text: flags 0 and 1, reals with 6 decimals.

    Texts are on one line, with control characters spelled out. Empty where there is none, which
    only a field of ours can be.
    """
    if value is None:
        return ""
    if field.kind == "real":
        return f"{value:.6f}"
    return str(int(value)) if isinstance(value, bool) else one_line(str(value))


class CsvWriter:
    """llama-bench's columns, then ours."""

    def __init__(self, by: BuildInfo) -> None:
        self._by = by

    def header(self) -> str:
        """The names."""
        return ",".join(field.name for field in (*FIELDS, *OURS)) + "\n"

    def row(self, row: BenchRow) -> str:
        """One line; a quote in a value is doubled."""
        found = [(field, field.value(row, self._by)) for field in (*FIELDS, *OURS)]
        values = [csv_cell(v) if isinstance(v, str) else plain(field, v) for field, v in found]
        return ",".join('"' + value.replace('"', '""') + '"' for value in values) + "\n"

    def footer(self) -> str:
        """Nothing."""
        return ""


KEYS = (*FIELDS, *SAMPLES, *OURS, *OUR_SAMPLES)


def row_object(row: BenchRow, by: BuildInfo) -> dict[str, Any]:
    """All keys of a row; reals have 6 decimals, which is what llama-bench writes."""
    return {field.name: _jsonable(field.value(row, by)) for field in KEYS}


def _jsonable(value: Value) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


class JsonWriter:
    """A bare array. It is closed by `footer`, so it is valid after an interruption too.

    Without a row it is `[]`.
    """

    def __init__(self, by: BuildInfo) -> None:
        self._by = by
        self._first = True

    def header(self) -> str:
        """The bracket that opens."""
        return "["

    def row(self, row: BenchRow) -> str:
        """One element, with the comma before it."""
        before, self._first = "\n" if self._first else ",\n", False
        lines = [
            f"    {json.dumps(name)}: {json.dumps(value)}"
            for name, value in row_object(row, self._by).items()
        ]
        return before + "  {\n" + ",\n".join(lines) + "\n  }"

    def footer(self) -> str:
        """The bracket that closes."""
        return "]\n" if self._first else "\n]\n"


class JsonLinesWriter:
    """An object a line."""

    def __init__(self, by: BuildInfo) -> None:
        self._by = by

    def header(self) -> str:
        """Nothing."""
        return ""

    def row(self, row: BenchRow) -> str:
        """One line."""
        return json.dumps(row_object(row, self._by)) + "\n"

    def footer(self) -> str:
        """Nothing."""
        return ""


THEIRS, BESIDE = "llama_bench", "llmcli_bench"
TYPES = {"text": "TEXT", "integer": "INTEGER", "boolean": "INTEGER", "real": "REAL"}

# which row of the other table it belongs to: that table has no key, but a number SQLite gives it
_NUMBER = "llama_bench_rowid"


class SqlWriter:
    """Both tables are created where they are not there yet; each row is one INSERT into each."""

    def __init__(self, by: BuildInfo) -> None:
        self._by = by

    def header(self) -> str:
        """The two tables."""
        theirs = [f"  {field.name} {TYPES[field.kind]}" for field in FIELDS]
        ours = [f"  {field.name} {TYPES[field.kind]}" for field in OURS]
        return _table(THEIRS, theirs) + _table(BESIDE, [f"  {_NUMBER} INTEGER", *ours])

    def row(self, row: BenchRow) -> str:
        """Two lines."""
        return (
            f"INSERT INTO {THEIRS} ({_names(FIELDS)}) VALUES ({self._values(FIELDS, row)});\n"
            f"INSERT INTO {BESIDE} ({_NUMBER}, {_names(OURS)}) "
            f"VALUES (last_insert_rowid(), {self._values(OURS, row)});\n"
        )

    def footer(self) -> str:
        """Nothing."""
        return ""

    def _values(self, fields: Sequence[Field], row: BenchRow) -> str:
        return ", ".join(_quoted(field, row, self._by) for field in fields)


def _table(name: str, columns: Sequence[str]) -> str:
    return f"CREATE TABLE IF NOT EXISTS {name} (\n" + ",\n".join(columns) + "\n);\n\n"


def _names(fields: Sequence[Field]) -> str:
    return ", ".join(field.name for field in fields)


def _quoted(field: Field, row: BenchRow, by: BuildInfo) -> str:
    """Every value in quotes, as llama-bench writes it; NULL where one of ours is not there."""
    value = field.value(row, by)
    return "NULL" if value is None else "'" + plain(field, value).replace("'", "''") + "'"


WRITERS: dict[str, Callable[[BuildInfo], Writer]] = {
    "csv": CsvWriter,
    "json": JsonWriter,
    "jsonl": JsonLinesWriter,
    "sql": SqlWriter,
}
