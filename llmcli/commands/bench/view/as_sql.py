"""Rows as SQL: llama-bench's table, and a second one for what is ours."""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.commands.bench.report.fields import FIELDS, OURS, Bencher, Field
from llmcli.commands.bench.report.results import BenchRow
from llmcli.commands.bench.view.as_csv import plain

THEIRS, BESIDE = "llama_bench", "llmcli_bench"
TYPES = {"text": "TEXT", "integer": "INTEGER", "boolean": "INTEGER", "real": "REAL"}

# which row of the other table it belongs to: that table has no key, but a number SQLite gives it
_NUMBER = "llama_bench_rowid"


class SqlWriter:
    """Both tables are created where they are not there yet; each row is one INSERT into each."""

    def __init__(self, by: Bencher) -> None:
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


def _quoted(field: Field, row: BenchRow, by: Bencher) -> str:
    """Every value in quotes, as llama-bench writes it; NULL where one of ours is not there."""
    value = field.value(row, by)
    return "NULL" if value is None else "'" + plain(field, value).replace("'", "''") + "'"
