"""Rows as CSV: names in the first line as they are, every value in quotes."""

from __future__ import annotations

from llmcli.commands.bench.report.fields import FIELDS, OURS, Bencher, Field, Value
from llmcli.commands.bench.report.results import BenchRow


def plain(field: Field, value: Value) -> str:
    """A value as llama-bench writes it in text: flags 0 and 1, reals with 6 decimals.

    Empty where there is none, which only a field of ours can be.
    """
    if value is None:
        return ""
    if field.kind == "real":
        return f"{value:.6f}"
    return str(int(value)) if isinstance(value, bool) else str(value)


class CsvWriter:
    """llama-bench's columns, then ours."""

    def __init__(self, by: Bencher) -> None:
        self._by = by

    def header(self) -> str:
        """The names."""
        return ",".join(field.name for field in (*FIELDS, *OURS)) + "\n"

    def row(self, row: BenchRow) -> str:
        """One line; a quote in a value is doubled."""
        values = [plain(field, field.value(row, self._by)) for field in (*FIELDS, *OURS)]
        return ",".join('"' + value.replace('"', '""') + '"' for value in values) + "\n"

    def footer(self) -> str:
        """Nothing."""
        return ""
