"""Results of llama-bench and of our own `bench`, in whatever format they were written.

The format is told by what is in the file, not by its name: JSON, JSONL, CSV, SQL and Markdown of
either program, an SQLite database with llama-bench's table, and the document of `bench --json`.
Several runs may stand in one file, one after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llmcli.commands.bench.measure.row import HINT, build_of, to_result
from llmcli.commands.bench.measure.sql import database_rows, sql_rows
from llmcli.commands.bench.measure.tables import csv_rows, csv_start, markdown_rows
from llmcli.commands.bench.report.comparison import Result, Results
from llmcli.errors import UsageError


def read_results(data: bytes, name: str) -> Results:
    """The rows of a file that the user calls `name`.

    Raises UsageError with the place for what is no result, cut off, or says what cannot be.
    """
    if data.startswith(b"SQLite format 3\0"):
        found: tuple[str, Iterable[Mapping[str, Any]]] = ("SQLite", database_rows(data, name))
    else:
        text = _decoded(data, name)
        if not text.strip():
            raise UsageError(f"`{name}` is empty", hint=HINT)
        found = _sniffed(text, name)
    kind, rows = found
    read: list[Result] = []
    builds: dict[str, None] = {}
    for row in rows:  # one by one: what is no row is refused before all of them are in memory
        read.append(to_result(row, f"row {len(read) + 1} of `{name}`"))
        builds[build_of(row)] = None
    if not read:
        raise UsageError(f"`{name}` has no result in it", hint=HINT)
    named = tuple(filter(None, builds))
    return Results(name=name, format=kind, builds=named, rows=tuple(read))


def _decoded(data: bytes, name: str) -> str:
    """UTF-8, or UTF-16 with its mark, which is what `>` writes in PowerShell."""
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        return data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"`{name}` is no text (byte {error.start})", hint=HINT) from error


def _sniffed(text: str, name: str) -> tuple[str, Iterable[Mapping[str, Any]]]:
    if text.lstrip()[0] in "[{":
        lines = re.match(r'\s*\{(?!\s*"schema")', text)
        return "JSONL" if lines else "JSON", _objects(_values(text, name), name)
    if re.search(r"(?:^|;)[ \t]*(CREATE|INSERT)\s", text, re.IGNORECASE | re.MULTILINE):
        return "SQL", sql_rows(text, name)
    if re.search(r"^[ \t]*\|.*\|[ \t]*t/s[ \t]*\|[ \t\r]*$", text, re.MULTILINE):
        return "Markdown", markdown_rows(text, name)
    if csv_start(text) is not None:
        return "CSV", csv_rows(text, name)
    raise UsageError(f"`{name}` is no result of a benchmark", hint=HINT)


def _values(text: str, name: str) -> Iterator[Any]:
    """JSON values one after the other, with anything white between them."""
    decoder, end = json.JSONDecoder(), len(text.rstrip())
    at = len(text) - len(text.lstrip())
    while at < end:
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            cut = error.pos >= end or "Unterminated" in error.msg
            what = "is cut off" if cut else f"is not JSON: {error.msg[:1].lower()}{error.msg[1:]}"
            raise UsageError(f"line {error.lineno} of `{name}` {what}", hint=HINT) from error
        except (ValueError, RecursionError) as error:  # 5,000 digits, or 5,000 brackets
            deep = isinstance(error, RecursionError)
            reason = "it is nested too deeply" if deep else "it has a number of thousands of digits"
            raise UsageError(f"`{name}` is not JSON: {reason}", hint=HINT) from error
        yield value
        while at < end and text[at].isspace():
            at += 1


def _objects(values: Iterable[Any], name: str) -> Iterator[Mapping[str, Any]]:
    """The rows in an array, a line, or our document."""
    for value in values:
        document = isinstance(value, dict) and str(value.get("schema", "")).startswith("llmcli.")
        if document and value["schema"] != "llmcli.bench/1":
            raise UsageError(f"`{name}` is a `{value['schema']}`, not a benchmark", hint=HINT)
        rows = value.get("rows") if document else value
        for row in rows if isinstance(rows, list) else [rows]:
            if not isinstance(row, dict):
                raise UsageError(f"`{name}` is no result of a benchmark", hint=HINT)
            yield row
