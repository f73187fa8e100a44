"""Rows as JSON: an array as llama-bench indents it, or an object a line."""

from __future__ import annotations

import json
import math
from typing import Any

from llmcli.commands.bench.report.fields import FIELDS, OUR_SAMPLES, OURS, SAMPLES, Bencher, Value
from llmcli.commands.bench.report.results import BenchRow
from llmcli.ui.theme import encodable

KEYS = (*FIELDS, *SAMPLES, *OURS, *OUR_SAMPLES)


def row_object(row: BenchRow, by: Bencher) -> dict[str, Any]:
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

    def __init__(self, by: Bencher) -> None:
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

    def __init__(self, by: Bencher) -> None:
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
