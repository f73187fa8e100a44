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
from typing import Any

from llmcli.commands.bench.report.comparison import Result, Source
from llmcli.commands.bench.report.intervals import Rate
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


def _refused(words: str) -> UsageError:
    return UsageError(words, hint=HINT)


class _Row:
    """A row of any format; errors name its place, `where`."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def result(self) -> Result:
        """Raises UsageError for missing fields and impossible numbers."""
        values = self._values
        # files from before llama-bench knew depths have none
        depth = self._count("n_depth") if "n_depth" in values else 0
        test = Test(n_prompt=self._count("n_prompt"), n_gen=self._count("n_gen"), n_depth=depth)
        if not test.tokens:
            raise _refused(f"{self._where} reads and writes no token")
        error = values.get("error")
        if isinstance(error, Mapping):  # as in a document of ours
            error = error.get("message") or "error"
        error = str(error) if error else None
        if values.get("meta") in (True, 1, "1", "true") and not error:
            error = "not timed: on the meta device nothing is computed"
        rate = None if error else self._rate(test)
        if rate is None and not error:
            error = "not timed"
        inconsistency = ""
        if rate is not None and values.get("avg_ts") is not None:
            mean = self._number("avg_ts")
            if abs(mean - rate.mean) > _MOST_OFF * rate.mean:
                inconsistency = (
                    f"{self._where} says {mean:g} tokens per second, and its runs {rate.mean:g}"
                )
        return Result(
            test=test.name,
            facts={field: _spelled(field, values[field]) for field in COMPARED if field in values},
            rate=rate,
            error=error,
            inconsistency=inconsistency,
        )

    def _rate(self, test: Test) -> Rate | None:
        """From the single runs where they are listed, else from mean and deviation.

        None for a mean of 0: nothing has run. The runs' times have more digits than their rates.
        """
        rates = self._samples("samples_ts")
        if times := self._samples("samples_ns"):
            rates = [1e9 * test.tokens / ns for ns in times]
        for one in rates:  # numbers near the largest that there is cannot be averaged
            self._checked(Rate(mean=one, std=0.0, runs=1))
        if rates:
            return self._checked(Rate.of(rates))
        runs = self._count("runs") if self._values.get("runs") not in (None, "") else 0
        mean = self._number("avg_ts")
        std = self._number("stddev_ts") if self._values.get("stddev_ts") is not None else 0.0
        return self._checked(Rate(mean=mean, std=std, runs=runs or None)) if mean else None

    def _samples(self, field: str) -> list[float]:
        """The runs, none where the format has no lists."""
        values = self._values.get(field)
        if not isinstance(values, list):
            return []
        numbers = [self._number(field, value) for value in values]
        if numbers and min(numbers) <= 0:
            raise _refused(f"{self._where}: `{field}` has a run of `{min(numbers):g}`")
        return numbers

    def _checked(self, rate: Rate) -> Rate:
        if not (_SLOWEST <= rate.mean <= _FASTEST and 0 <= rate.std <= _FASTEST):
            words = f"{rate.mean:g} ± {rate.std:g}"
            raise _refused(f"{self._where}: no test runs at `{words}` tokens per second")
        return rate

    def _count(self, field: str) -> int:
        number = self._number(field)
        if number != int(number) or not 0 <= number <= _MOST_TOKENS:
            raise _refused(f"{self._where}: `{field}` is no number of tokens: `{number:g}`")
        return int(number)

    def _number(self, field: str, *item: Any) -> float:
        """A finite number, also where the format knows only text; `item`: of a list there."""
        (value,) = item or (self._values.get(field),)
        if value is None:
            raise _refused(f"{self._where} has no `{field}`")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            text = str(value) if len(str(value)) <= 40 else str(value)[:40] + "…"
            raise _refused(f"{self._where}: `{field}` is no number: `{text}`")
        return number


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
        raise _refused(f"line {line} of `{name}` is not CSV: {error}") from error


def read_results(data: bytes, name: str) -> Source:
    """Read the rows of a file that messages call `name`.

    Raises UsageError with the place of what is not a result, is cut off, or is impossible.
    """
    if data.startswith(b"SQLite format 3\0"):
        raise _sql(name)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(f"`{name}` is no text (byte {error.start})") from error
    if not text.strip():
        raise _refused(f"`{name}` is empty")
    slowed: list[bool] = []
    kind, rows = _detected(text, name, slowed)
    found: list[Result] = []
    builds: dict[str, None] = {}
    for row in rows:  # one by one: what is no row is refused before all of them are in memory
        found.append(_Row(row, f"row {len(found) + 1} of `{name}`").result())
        commit, number = row.get("build_commit"), row.get("build_number")
        if commit:
            builds[str(commit) if number in (None, "") else f"{commit} ({number})"] = None
    if not found:
        raise _refused(f"`{name}` has no result in it")
    return Source(
        name=name,
        format=kind,
        builds=tuple(builds),
        rows=len(found),
        slowed=any(slowed) if slowed else None,
        results=tuple(found),
    )


def _detected(text: str, name: str, slowed: list[bool]) -> tuple[str, Iterable[Mapping[str, Any]]]:
    """The format and its rows; what documents say of `slowed` is appended to the list."""
    if text.lstrip()[0] in "[{":
        lines = re.match(r'\s*\{(?!\s*"schema")', text)
        return "JSONL" if lines else "JSON", _json_rows(text, name, slowed)
    if re.search(r"(?:^|;)[ \t]*(CREATE|INSERT)\s", text, re.IGNORECASE | re.MULTILINE):
        raise _sql(name)
    if re.search(r"^[ \t]*\|.*\|[ \t]*t/s[ \t]*\|[ \t\r]*$", text, re.MULTILINE):
        raise UsageError(
            f"`{name}` is a Markdown table; only JSON, JSONL and CSV can be compared",
            hint="write the results with `-o json`",
        )
    if (start := _csv_start(text)) is not None:
        return "CSV", _csv_rows(text, start, name)
    raise _refused(f"`{name}` is no result of a benchmark")


def _sql(name: str) -> UsageError:
    return UsageError(
        f"`{name}` is SQL, which `bench compare` does not read",
        hint="write the results with `-o json`; a database exports them with "
        "`sqlite3 -json FILE 'SELECT * FROM llama_bench'`",
    )


def _json_rows(text: str, name: str, slowed: list[bool]) -> Iterator[Mapping[str, Any]]:
    """The rows of arrays, of lines, or of our documents, one after the other."""
    for value in _json_values(text, name):
        rows = value
        if isinstance(value, dict) and str(value.get("schema", "")).startswith("llmcli."):
            if value["schema"] != "llmcli.bench/1":
                raise _refused(f"`{name}` is a `{value['schema']}`, not a benchmark")
            rows, load = value.get("rows"), value.get("machine_load")
            if isinstance(load, dict) and isinstance(load.get("slowed"), bool):
                slowed.append(load["slowed"])
        for row in rows if isinstance(rows, list) else [rows]:
            if not isinstance(row, dict):
                raise _refused(f"`{name}` is no result of a benchmark")
            yield row


def _json_values(text: str, name: str) -> Iterator[Any]:
    """JSON values one after the other, with anything white between them."""
    decoder, end = json.JSONDecoder(), len(text.rstrip())
    at = len(text) - len(text.lstrip())
    while at < end:
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            cut = error.pos >= end or "Unterminated" in error.msg
            what = "is cut off" if cut else f"is not JSON: {error.msg[:1].lower()}{error.msg[1:]}"
            raise _refused(f"line {error.lineno} of `{name}` {what}") from error
        except (ValueError, RecursionError) as error:  # 5,000 digits, or 5,000 brackets
            deep = isinstance(error, RecursionError)
            reason = "it is nested too deeply" if deep else "it has a number of thousands of digits"
            raise _refused(f"`{name}` is not JSON: {reason}") from error
        yield value
        while at < end and text[at].isspace():
            at += 1
