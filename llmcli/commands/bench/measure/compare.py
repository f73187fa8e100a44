"""Two results of a benchmark: read and validated, and test by test, how much faster B is.

JSON, JSONL or CSV of llama-bench or of our own `bench`, which is detected by what is in the file,
not by its name. Several runs may stand in one file, one after the other.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from llmcli.commands.bench.report.comparison import (
    USUAL_RUNS,
    ComparedTest,
    ComparisonReport,
    Difference,
    MissingSetting,
    Rate,
    Result,
    Side,
    Source,
    UnmatchedTest,
    pool,
)
from llmcli.commands.bench.report.row import THEIRS, count_words, size_words
from llmcli.errors import UsageError
from llmcli.records.engines import EngineInfo, SpeedTest
from llmcli.records.ranges import Range
from llmcli.shell.documents import read

# Fields of a row that are not settings, and settings that stand behind one of llama-bench's: ours,
# and those of its other versions. A file need not have all of them.
_RESULTS = {
    "build_commit", "build_number", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns",
    "stddev_ns", "avg_ts", "stddev_ts",
}  # fmt: skip
_BEHIND = {
    "model_n_params": ("dtype", "weight_format", "product_format", "device"),
    "use_mmap": ("use_direct_io", "load_mode"),
    "no_host": ("repack",),
}
COMPARED = (
    "engine",
    *(name for one in THEIRS if one not in _RESULTS for name in (one, *_BEHIND.get(one, ()))),
)
HINT = "give what llama-bench or `llmcli bench` has written with -o json, jsonl or csv"
_MOST_OFF = 0.01  # of a mean from that of the runs, relative
_SLOWEST, _FASTEST = 1e-9, 1e15  # tokens per second
# Known only when a model has been loaded, so that a row which failed may say anything there.
_LEARNED = {one.name for one in fields(EngineInfo)} - {"engine"}
_LEARNED |= {"type_v", "n_gpu_layers", "flash_attn"}

_OTHER: Mapping[Side, Side] = {"a": "b", "b": "a"}

Key = tuple[str, tuple[str, ...]]  # a test's name, and the values of the fields that vary


def compare_results(a: Source, b: Source, *, slower_than: float | None = None) -> ComparisonReport:
    """B against A, test by test.

    A setting that takes several values on a side tells tests apart: its values have to be equal.
    One that is the same throughout each side does not, and is a `Difference` where the sides do
    not agree: two builds, two machines or two dtypes can be compared. Rows of a side that are the
    same test are pooled, run by run. `slower_than`: the share (0 … 1) that B may be slower.
    """
    # rows with a rate know their settings; all rows where there is none
    known = [[row for row in side.results if row.rate] or side.results for side in (a, b)]
    varying, differences, unsaid = [], [], []
    for field in COMPARED:
        if any(len({row.facts.get(field, "") for row in rows}) > 1 for rows in known):
            varying.append(field)
            continue
        one, two = (rows[0].facts.get(field) for rows in known)
        if one is not None and two is not None:
            differences += [Difference(field=field, a=one, b=two)] if one != two else []
        elif one or two:
            unsaid.append(MissingSetting(side="b" if one else "a", field=field))
    tests, lone = _matched({"a": a.results, "b": b.results}, varying)
    return ComparisonReport(
        a=a,
        b=b,
        tests=tuple(tests),
        lone=tuple(lone),
        differences=tuple(differences),
        unsaid=tuple(unsaid),
        assumed_runs=USUAL_RUNS,
        slower_than=slower_than,
    )


def _matched(
    sides: Mapping[Side, Sequence[Result]], varying: Sequence[str]
) -> tuple[list[ComparedTest], list[UnmatchedTest]]:
    """The tests of both sides; and those of one side, then rows that did not run."""
    rates: dict[Side, dict[Key, Rate]] = {}
    failed: list[tuple[Side, Key, str | None]] = []  # and why there is no rate
    for side, results in sides.items():
        repeated: dict[Key, list[Rate]] = {}
        for row in results:
            key = row.test, tuple(row.facts.get(field, "") for field in varying)
            if row.rate is None:
                failed.append((side, key, row.error))
            else:
                repeated.setdefault(key, []).append(row.rate)
        rates[side] = {key: pool(several) for key, several in repeated.items()}
    shown = _shown(varying, [*rates["a"], *rates["b"]] or [key for _, key, _ in failed])
    sure = [place for place, field in enumerate(varying) if field not in _LEARNED]

    def settings(key: Key) -> dict[str, str]:
        return {varying[place]: key[1][place] for place in shown}

    def certain(key: Key) -> Key:
        """What a row that failed knows of itself."""
        return key[0], tuple(key[1][place] for place in sure)

    # what ran on both sides is no counterpart of a row that failed
    alone = [
        (side, key) for side, ran in rates.items() for key in ran if key not in rates[_OTHER[side]]
    ]
    counterparts = {(side, certain(key)): key for side, key in alone}
    broken, missed = [], set()
    for side, key, error in failed:
        other = _OTHER[side]
        there = counterparts.get((other, certain(key)))
        missed.add((other, there))
        broken.append(
            UnmatchedTest(
                side=side,
                test=key[0],
                settings=settings(there or key),
                rate=None,
                error=error,
                other=None if there is None else rates[other][there],
            )
        )
    lone = [
        UnmatchedTest(side=side, test=key[0], settings=settings(key), rate=rates[side][key])
        for side, key in alone
        if (side, key) not in missed
    ]
    tests = [
        ComparedTest.of(key[0], settings(key), rate, rates["b"][key])
        for key, rate in rates["a"].items()
        if key in rates["b"]
    ]
    return tests, lone + broken


def _shown(fields: Sequence[str], keys: Sequence[Key]) -> Sequence[int]:
    """Places of as few fields as tell the keys apart that all of them do.

    Two models differ in name, size and number of parameters; the name says which it is.
    """
    shown: tuple[int, ...] = ()
    known = 1
    for place in sorted(range(len(fields)), key=lambda place: fields[place] != "model_type"):
        more = (*shown, place)
        count = len({tuple(values[at] for at in more) for _, values in keys})
        if count > known:
            shown, known = more, count
    return sorted(shown)


def _refused(words: str) -> UsageError:
    return UsageError(words, hint=HINT)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What a row measured; its settings are beside it. Old files have no depths, CSV no lists."""

    hint: ClassVar[str] = HINT
    n_prompt: Annotated[int, Range(0)]
    n_gen: Annotated[int, Range(0)]
    n_depth: Annotated[int, Range(0)] = 0
    avg_ts: Annotated[float, Range(0, _FASTEST)] | None = None
    stddev_ts: Annotated[float, Range(0, _FASTEST)] | None = None
    runs: Annotated[int, Range(0)] | None = None
    samples_ns: tuple[Annotated[float, Range(0, above=True)], ...] | None = None
    samples_ts: tuple[Annotated[float, Range(_SLOWEST, _FASTEST)], ...] | None = None


_NUMBERS = {one.name for one in fields(_Row)}  # in CSV they are text


def _result(values: Mapping[str, Any], where: str) -> Result:
    """A row of any format; errors name its place, `where`."""
    row = read(_Row, values, where)
    test = SpeedTest(n_prompt=row.n_prompt, n_gen=row.n_gen, n_depth=row.n_depth)
    if not test.tokens:
        raise _refused(f"{where} reads and writes no token")
    error = values.get("error")
    if isinstance(error, Mapping):  # as in a document of ours
        error = error.get("message") or "error"
    if not error and values.get("meta") in (True, 1, "1", "true"):
        error = "not timed: on the meta device nothing is computed"
    rate = None if error else _rate(row, test, where)
    inconsistency = ""
    if rate and row.avg_ts is not None and abs(row.avg_ts - rate.mean) > _MOST_OFF * rate.mean:
        inconsistency = (
            f"{where} records {row.avg_ts:g} tokens per second, but its runs average {rate.mean:g}"
        )
    return Result(
        test=test.name,
        facts={field: _spelled(field, values[field]) for field in COMPARED if field in values},
        rate=rate,
        error=None if rate else str(error or "not timed"),
        inconsistency=inconsistency,
    )


def _rate(row: _Row, test: SpeedTest, where: str) -> Rate | None:
    """From the single runs where they are listed, else from mean and deviation.

    None for a mean of 0: nothing has run. The runs' times have more digits than their rates.
    """
    runs = [1e9 * test.tokens / ns for ns in row.samples_ns or ()] or list(row.samples_ts or ())
    rates = runs or [one for one in (row.avg_ts,) if one is not None]
    if not rates:
        raise _refused(f"{where} has no `avg_ts`")
    if not any(rates):
        return None
    for rate in rates:  # numbers near the largest that there is cannot be averaged
        if not _SLOWEST <= rate <= _FASTEST:
            raise _refused(f"{where}: no test runs at `{rate:g}` tokens per second")
    if runs:
        return Rate.of(runs)
    return Rate(mean=rates[0], std=row.stddev_ts or 0.0, runs=row.runs or None)


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


def _number(cell: str) -> float | str | None:
    """None of an empty cell; what is no number stays as it is."""
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell


def _csv_rows(text: str, start: int, name: str) -> Iterator[dict[str, Any]]:
    """A row for each line below a heading; the first heading is at `start`.

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
                row: dict[str, Any] = dict(zip(heading, cells, strict=True))
                for field in _NUMBERS & row.keys():
                    row[field] = _number(row[field])
                yield row
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
        found.append(_result(row, f"row {len(found) + 1} of `{name}`"))
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
        yield from rows if isinstance(rows, list) else [rows]


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
