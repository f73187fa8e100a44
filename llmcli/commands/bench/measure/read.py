"""Results of llama-bench and of our own `bench`, validated: JSON, JSONL or CSV.

The format is detected by what is in the file, not by its name. Several runs may stand in one
file, one after the other.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean, stdev
from typing import Any

from llmcli.commands.bench.report.comparison import Rate, Result, Source
from llmcli.commands.bench.report.intervals import correlation
from llmcli.commands.bench.report.plan import Test
from llmcli.commands.bench.report.row import THEIRS, count_words, size_words
from llmcli.errors import UsageError

# Fields of a row that are not settings, and settings that stand behind one of llama-bench's: ours,
# and those of its other versions. A file need not have all of them.
_RESULTS = {
    "build_commit", "build_number", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns",
    "stddev_ns", "avg_ts", "stddev_ts",
}  # fmt: skip
_BEHIND = {
    "model_n_params": ("dtype", "weight_format", "product_format", "device"),
    "use_mmap": ("use_direct_io", "load_mode"), "no_host": ("repack",),
}  # fmt: skip
COMPARED = (
    "engine",
    *(name for one in THEIRS if one not in _RESULTS for name in (one, *_BEHIND.get(one, ()))),
)
HINT = "give what llama-bench or `llmcli bench` has written with -o json, jsonl or csv"
_MOST_TOKENS = 10**12  # of a test: what is beyond these is a mistake
_MOST_OFF = 0.01  # of a mean from that of the runs, relative
_SLOWEST, _FASTEST = 1e-9, 1e15  # tokens per second


def _to_result(row: Mapping[str, Any], where: str) -> Result:
    """Parse a row of any format; errors name its place, `where`.

    Raises UsageError for missing fields and impossible numbers.
    """
    test = _test(row, where)
    facts = {field: _spelled(field, row[field]) for field in COMPARED if field in row}
    error = row.get("error")
    if isinstance(error, Mapping):  # as in a document of ours
        error = error.get("message") or "error"
    error = str(error) if error else None
    if row.get("meta") in (True, 1, "1", "true") and not error:
        error = "not timed: on the meta device nothing is computed"
    rate = None if error else _rate(row, test, where)
    if rate is None and not error:
        error = "not timed"
    return Result(
        test=test.name,
        facts=facts,
        rate=rate,
        error=error,
        inconsistency=_inconsistency(row, rate, where),
    )


def _inconsistency(row: Mapping[str, Any], rate: Rate | None, where: str) -> str:
    """Describe a mean that contradicts the runs listed beside it; empty where they agree."""
    if rate is None or row.get("avg_ts") is None:
        return ""
    mean = _number(row, "avg_ts", where)
    if abs(mean - rate.mean) <= _MOST_OFF * rate.mean:
        return ""
    return f"{where} says {mean:g} tokens per second, and its runs {rate.mean:g}"


def _test(row: Mapping[str, Any], where: str) -> Test:
    """Files from before llama-bench knew depths have none."""
    counts = [_count(row, field, where) for field in ("n_prompt", "n_gen")]
    depth = _count(row, "n_depth", where) if "n_depth" in row else 0
    if not any(counts):
        raise UsageError(f"{where} reads and writes no token", hint=HINT)
    return Test(n_prompt=counts[0], n_gen=counts[1], n_depth=depth)


def _count(row: Mapping[str, Any], field: str, where: str) -> int:
    number = _number(row, field, where)
    if number != int(number) or not 0 <= number <= _MOST_TOKENS:
        raise UsageError(f"{where}: `{field}` is no number of tokens: `{number:g}`", hint=HINT)
    return int(number)


def _number(row: Mapping[str, Any], field: str, where: str) -> float:
    """A finite number, also where the format knows only text."""
    if row.get(field) is None:
        raise UsageError(f"{where} has no `{field}`", hint=HINT)
    value = row[field]
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        text = str(value) if len(str(value)) <= 40 else str(value)[:40] + "…"
        raise UsageError(f"{where}: `{field}` is no number: `{text}`", hint=HINT)
    return number


def _rate(row: Mapping[str, Any], test: Test, where: str) -> Rate | None:
    """From the single runs where they are listed, else from mean and deviation.

    None for a mean of 0: nothing has run. The runs' times have more digits than their rates.
    """
    rates = _samples(row, "samples_ts", where)
    times = _samples(row, "samples_ns", where)
    if times:
        rates = [1e9 * test.tokens / ns for ns in times]
    for one in rates:  # numbers near the largest that there is cannot be averaged
        _checked(Rate(mean=one, std=0.0, runs=1), where)
    if rates:
        rate = Rate(
            mean=fmean(rates),
            std=stdev(rates) if len(rates) > 1 else 0.0,
            runs=len(rates),
            correlation=correlation(rates),
        )
        return _checked(rate, where)
    runs = _count(row, "runs", where) if row.get("runs") not in (None, "") else 0
    mean = _number(row, "avg_ts", where)
    std = _number(row, "stddev_ts", where) if row.get("stddev_ts") is not None else 0.0
    return _checked(Rate(mean=mean, std=std, runs=runs or None), where) if mean else None


def _samples(row: Mapping[str, Any], field: str, where: str) -> list[float]:
    """The runs, none where the format has no lists."""
    values = row.get(field)
    if not isinstance(values, list):
        return []
    numbers = [_number({field: value}, field, where) for value in values]
    if numbers and min(numbers) <= 0:
        raise UsageError(f"{where}: `{field}` has a run of `{min(numbers):g}`", hint=HINT)
    return numbers


def _checked(rate: Rate, where: str) -> Rate:
    if not (_SLOWEST <= rate.mean <= _FASTEST and 0 <= rate.std <= _FASTEST):
        words = f"{rate.mean:g} ± {rate.std:g}"
        raise UsageError(f"{where}: no test runs at `{words}` tokens per second", hint=HINT)
    return rate


def _spelled(field: str, value: Any) -> str:
    """One spelling for what JSON and CSV write differently."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    text = str(value).strip()
    if field == "model_filename":  # directories differ between machines
        return re.split(r"[/\\]", text)[-1]
    if field in ("model_size", "model_n_params") and re.fullmatch(r"\d{1,18}", text):
        if int(text) == 0:  # no model was loaded
            return ""
        return (size_words if field == "model_size" else count_words)(int(text))
    return text


def _csv_start(text: str) -> int | None:
    """Find the offset of the first heading line; llama-bench may print other lines before it."""
    start = 0
    for line in io.StringIO(text):  # lazily: a large file that is none is no list of lines
        if {"n_prompt", "n_gen", "avg_ts"} <= {name.strip(' "\r\n') for name in line.split(",")}:
            return start
        start += len(line)
    return None


def _csv_rows(text: str, start: int, name: str) -> Iterator[dict[str, str]]:
    """A row for each line below a heading, the first of which is at `start`.

    A heading in between begins another run. Raises UsageError for a line with too few or too
    many values.
    """
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


def read_results(data: bytes, name: str) -> Source:
    """Read the rows of a file that messages call `name`.

    Raises UsageError with the place of what is not a result, is cut off, or is impossible.
    """
    if data.startswith(b"SQLite format 3\0"):
        raise _sql(name)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"`{name}` is no text (byte {error.start})", hint=HINT) from error
    if not text.strip():
        raise UsageError(f"`{name}` is empty", hint=HINT)
    slowed: list[bool] = []
    kind, rows = _detected(text, name, slowed)
    found: list[Result] = []
    builds: dict[str, None] = {}
    for row in rows:  # one by one: what is no row is refused before all of them are in memory
        found.append(_to_result(row, f"row {len(found) + 1} of `{name}`"))
        commit, number = row.get("build_commit"), row.get("build_number")
        if commit:
            builds[str(commit) if number in (None, "") else f"{commit} ({number})"] = None
    if not found:
        raise UsageError(f"`{name}` has no result in it", hint=HINT)
    return Source(
        name=name,
        format=kind,
        builds=tuple(builds),
        rows=len(found),
        slowed=any(slowed) if slowed else None,
        results=tuple(found),
    )


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
    if (start := _csv_start(text)) is not None:
        return "CSV", _csv_rows(text, start, name)
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
    """Yield the rows of an array, a line, or our document; append its `slowed` to the list."""
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
