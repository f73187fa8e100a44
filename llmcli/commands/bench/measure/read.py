"""Results of llama-bench and of our own `bench`: JSON, JSONL or CSV.

The format is detected by what is in the file, not by its name. Several runs may stand in one
file, one after the other.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llmcli.commands.bench.measure.row import HINT, build_of, to_result
from llmcli.commands.bench.report.comparison import Result, Results
from llmcli.errors import UsageError


def csv_start(text: str) -> int | None:
    """Where the first line with llama-bench's names begins; what it printed before is no table."""
    start = 0
    for line in io.StringIO(text):  # lazily: a large file that is none is no list of lines
        if {"n_prompt", "n_gen", "avg_ts"} <= {name.strip(' "\r\n') for name in line.split(",")}:
            return start
        start += len(line)
    return None


def csv_rows(text: str, name: str) -> Iterator[dict[str, str]]:
    """A row for each line below a heading; a heading in between begins another run.

    Raises UsageError for a line that has too few values or too many.
    """
    start = csv_start(text) or 0
    table = csv.reader(io.StringIO(text[start:], newline=""), strict=True)
    before = text.count("\n", 0, start)
    heading: list[str] = []
    try:
        for cells in table:
            if "n_prompt" in cells:
                heading = cells
            elif cells:
                if len(cells) != len(heading):
                    raise UsageError(
                        f"line {before + table.line_num} of `{name}` has {len(cells)} values for "
                        f"{len(heading)} columns",
                        hint="it may have been cut off: write it again",
                    )
                yield dict(zip(heading, cells, strict=True))
    except csv.Error as error:
        line = before + table.line_num
        raise UsageError(f"line {line} of `{name}` is not CSV: {error}", hint=HINT) from error


def read_results(data: bytes, name: str) -> Results:
    """The rows of a file that the user calls `name`.

    Raises UsageError with the place for what is no result, cut off, or says what cannot be.
    """
    if data.startswith(b"SQLite format 3\0"):
        raise _sql(name)
    text = _decoded(data, name)
    if not text.strip():
        raise UsageError(f"`{name}` is empty", hint=HINT)
    slowed: list[bool] = []
    kind, rows = _detected(text, name, slowed)
    read: list[Result] = []
    builds: dict[str, None] = {}
    for row in rows:  # one by one: what is no row is refused before all of them are in memory
        read.append(to_result(row, f"row {len(read) + 1} of `{name}`"))
        builds[build_of(row)] = None
    if not read:
        raise UsageError(f"`{name}` has no result in it", hint=HINT)
    named = tuple(filter(None, builds))
    return Results(
        name=name,
        format=kind,
        builds=named,
        rows=tuple(read),
        slowed=any(slowed) if slowed else None,
    )


def _decoded(data: bytes, name: str) -> str:
    """UTF-8, with or without a byte-order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"`{name}` is no text (byte {error.start})", hint=HINT) from error


def _detected(text: str, name: str, slowed: list[bool]) -> tuple[str, Iterable[Mapping[str, Any]]]:
    if text.lstrip()[0] in "[{":
        lines = re.match(r'\s*\{(?!\s*"schema")', text)
        return "JSONL" if lines else "JSON", _objects(_values(text, name), name, slowed)
    if re.search(r"(?:^|;)[ \t]*(CREATE|INSERT)\s", text, re.IGNORECASE | re.MULTILINE):
        raise _sql(name)
    if re.search(r"^[ \t]*\|.*\|[ \t]*t/s[ \t]*\|[ \t\r]*$", text, re.MULTILINE):
        raise UsageError(
            f"`{name}` is a Markdown table; only JSON, JSONL and CSV can be compared",
            hint="write the results with `-o json`",
        )
    if csv_start(text) is not None:
        return "CSV", csv_rows(text, name)
    raise UsageError(f"`{name}` is no result of a benchmark", hint=HINT)


def _sql(name: str) -> UsageError:
    return UsageError(
        f"`{name}` is SQL, which `bench compare` does not read",
        hint="write the results with `-o json`; a database exports them with "
        "`sqlite3 -json FILE 'SELECT * FROM llama_bench'`",
    )


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


def _objects(values: Iterable[Any], name: str, slowed: list[bool]) -> Iterator[Mapping[str, Any]]:
    """The rows in an array, a line, or our document, whose word on the machine goes to `slowed`."""
    for value in values:
        document = isinstance(value, dict) and str(value.get("schema", "")).startswith("llmcli.")
        if document and value["schema"] != "llmcli.bench/1":
            raise UsageError(f"`{name}` is a `{value['schema']}`, not a benchmark", hint=HINT)
        load = value.get("machine_load") if document else None
        if isinstance(load, dict) and isinstance(load.get("slowed"), bool):
            slowed.append(load["slowed"])
        rows = value.get("rows") if document else value
        for row in rows if isinstance(rows, list) else [rows]:
            if not isinstance(row, dict):
                raise UsageError(f"`{name}` is no result of a benchmark", hint=HINT)
            yield row
