"""Results of llama-bench and of our own `bench`: JSON, JSONL, CSV or Markdown.

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

# llama-bench's short headings of Markdown columns; every other column is called as its field
_HEADINGS = {
    "model": "model_type", "size": "model_size", "params": "model_n_params",
    "backend": "backends", "ngl": "n_gpu_layers", "threads": "n_threads", "sm": "split_mode",
    "mg": "main_gpu", "nkvo": "no_kv_offload", "fa": "flash_attn", "dev": "devices",
    "ts": "tensor_split", "ot": "tensor_buft_overrides", "mmap": "use_mmap", "dio": "use_direct_io",
    "lm": "load_mode", "embd": "embeddings", "nopo": "no_op_offload", "noh": "no_host",
}  # fmt: skip
_BARS = re.compile(r"(?<!\\)\|")
_TEST = re.compile(r"(?:pp ?(\d{1,12}))?\+?(?:tg ?(\d{1,12}))?(?: @ d(\d{1,12}))?", re.ASCII)
_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*(?:±|\+-|\\pm)\s*(\d+(?:\.\d+)?)", re.ASCII)
_BUILD = re.compile(r"build:\s*(\S+)\s*\((\d+)\)", re.ASCII)


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


def markdown_rows(text: str, name: str) -> Iterator[dict[str, Any]]:
    """A row for each line of the tables that end with `t/s`; other tables and text are passed over.

    Raises UsageError for a cell that says neither a rate nor an error.
    """
    heading: list[str] = []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(io.StringIO(text), 1):
        build = _BUILD.match(line.strip())
        if build:  # stands below the rows that it belongs to
            for row in rows:
                row.setdefault("build_commit", build[1])
                row.setdefault("build_number", build[2])
        if not line.strip().startswith("|"):
            heading = []
            continue
        bare = line.strip().removeprefix("|").removesuffix("|")
        cells = [cell.strip().replace("\\|", "|") for cell in _BARS.split(bare)]
        if cells[-1] == "t/s":
            heading = cells
        elif heading and not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            rows.append(_row(heading, cells, f"line {number} of `{name}`"))
    return iter(rows)


def _row(heading: list[str], cells: list[str], where: str) -> dict[str, Any]:
    # llama-bench does not mark a | in what it writes
    cells = [*cells[: len(heading) - 1], " | ".join(cells[len(heading) - 1 :])]
    if len(cells) != len(heading) or "test" not in heading:
        raise UsageError(f"{where} does not have the cells of its table", hint=HINT)
    fields = [_HEADINGS.get(head, head) for head in heading]
    row: dict[str, Any] = dict(zip(fields, cells, strict=True))
    test, speed = _TEST.fullmatch(row.pop("test")), row.pop("t/s")
    if test is None:
        raise UsageError(f"{where} has no test such as pp512 in it", hint=HINT)
    counts = [part or "0" for part in test.groups()]
    row |= zip(("n_prompt", "n_gen", "n_depth"), counts, strict=True)
    numbers = _SPEED.fullmatch(speed)
    if numbers:
        return row | {"avg_ts": numbers[1], "stddev_ts": numbers[2]}
    if speed.startswith("error"):
        return row | {"error": speed.removeprefix("error:").strip() or "error"}
    if speed == "not run":  # on the meta device nothing is computed
        return row | {"avg_ts": "0"}
    raise UsageError(f"{where} has no rate such as `12.34 ± 0.56` in it", hint=HINT)


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
    """UTF-8, or UTF-16 with its mark, which is what `>` writes in PowerShell."""
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        return data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"`{name}` is no text (byte {error.start})", hint=HINT) from error


def _detected(text: str, name: str, slowed: list[bool]) -> tuple[str, Iterable[Mapping[str, Any]]]:
    if text.lstrip()[0] in "[{":
        lines = re.match(r'\s*\{(?!\s*"schema")', text)
        return "JSONL" if lines else "JSON", _objects(_values(text, name), name, slowed)
    if re.search(r"(?:^|;)[ \t]*(CREATE|INSERT)\s", text, re.IGNORECASE | re.MULTILINE):
        raise _sql(name)
    if re.search(r"^[ \t]*\|.*\|[ \t]*t/s[ \t]*\|[ \t\r]*$", text, re.MULTILINE):
        return "Markdown", markdown_rows(text, name)
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
