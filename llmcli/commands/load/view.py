"""How a model was loaded: its ledger as a table, the time, and what the file says of itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.load.report import LedgerLine, LoadReport, MetadataCheck, Numbers, Shared
from llmcli.records.numbers import counted
from llmcli.ui.checks import BAD, GOOD, WRONG, Marked, render_checks
from llmcli.ui.layout import SEPARATOR, Column, Dotted, Rows
from llmcli.ui.rates import unit
from llmcli.ui.stats import SHORT, duration, size
from llmcli.ui.theme import FAINT, HEADING, one_line

# the first two stay whatever the width; those with the largest number go below their row first
_LEDGER = (
    Column("parameter", right=False),
    Column("tensor", right=False, drop=1),
    Column("stored", right=False, drop=2),
    Column("in the file", drop=8),
    Column("what was done", right=False, drop=3),
    Column("mean", drop=7, labelled=True),
    Column("std", drop=6, labelled=True),
    Column("min", drop=5, labelled=True),
    Column("max", drop=5, labelled=True),
    Column("zeros", drop=7, labelled=True),
)
_BAD = Column("NaN, ±∞", right=False)  # stays, too, where something is not finite
_MORE = ("--checks", "--all")  # show every verdict, and every tensor with its statistics
_LONGEST = 5  # stages that the short answer has
_STAGES = (
    Column("stage", right=False),
    Column("time"),
    Column("share", drop=2),
    Column("bytes", drop=1),
    Column("speed", drop=1),
)
LABEL = "!"  # a label that is not true, which nothing depends on
_DOUBTFUL = "yellow"
_WORDS = {
    "find": "find or fetch",
    "headers": "read the headers",
    "import": "import PyTorch",
    "plan": "plan",
    "tokenizer": "tokenizer",
    "build": "make room",
    "read": "read",
    "pack": "pack",
    "convert": "convert",
    "scan": "look at the numbers",
}


def render_load(
    report: LoadReport,
    model: str,
    lines: Sequence[LedgerLine],
    *,
    brief: bool = False,
    full: bool = False,
    checks: bool = False,
) -> RenderableType:
    """`lines` as a table, then time; the verdict is above it. `model` is its line.

    Columns for which there is no room are left out, with `full` or `brief` put below their rows.
    `brief`: of the rest only what is wrong, and the last verdict; `full`: each stage in a row;
    `checks`: every verdict, at the end.
    """
    columns, rows = list(_LEDGER), [_row(line, line.dtype or report.dtype) for line in lines]
    if any(_is_bad(line.numbers) for line in lines):
        columns.insert(2, _BAD)
        for row, line in zip(rows, lines, strict=True):
            row.insert(2, Text(_bad(line.numbers), style=row[0].style))
    table = Rows(columns, rows, spill=brief or full)
    if brief:
        return Group(Text(one_line(model), style=HEADING), table, *wrong(report))
    time: list[RenderableType] = [Dotted([*_durations(report)], FAINT)]
    if full:
        time = [Rows(_STAGES, list(_stages(report))), Text("")]
    shared = [Text(one_line(_shared(one)), style=FAINT) for one in report.shared]
    ending = [*wrong(report, () if full else _MORE), *_notes(report), *shared]
    return Group(
        Text(one_line(model), style=HEADING),
        *([] if checks else ending),
        Dotted(list(_facts(report)), FAINT),
        Text(""),
        table,
        Text(""),
        *time,
        *(verdicts(report) if checks else ()),
    )


def render_check(report: LoadReport, name: str) -> RenderableType:
    """The verdicts alone."""
    return Group(
        Text(one_line(name), style=HEADING),
        Dotted([*_facts(report)], FAINT),
        *verdicts(report),
    )


def _facts(report: LoadReport) -> Iterator[str]:
    files = f"{counted(report.files, 'file')}, {size(report.file_bytes)}"
    tensors = len({line.source for line in report.lines})
    yield f"{counted(tensors, 'tensor')} in {files}"
    if report.weight_bytes is not None:
        yield f"{counted(report.numbers, 'parameter')}, {size(report.weight_bytes)} of memory"
    if report.device_bytes is not None:
        yield f"at most {size(report.device_bytes)} of {report.device}"
    if report.peak_bytes is not None:
        before = "" if report.base_bytes is None else (
            f", of it {size(report.base_bytes)} Python and PyTorch before"
        )
        yield f"peak memory {size(report.peak_bytes)}{before}"


def _row(line: LedgerLine, dtype: str | None) -> list[Text]:
    numbers = line.numbers
    shape = f"{line.stored} [{' '.join(map(str, line.shape))}]"
    times = f" × {line.tensors}" if line.tensors > 1 else ""
    cells = [
        line.parameter or "–",
        line.source,
        shape + times,
        size(line.bytes),
        _done(line, dtype),
        *(_statistics(numbers) if numbers is not None else [""] * 5),
    ]
    style = WRONG if _is_bad(numbers) else FAINT if not line.parameter else ""
    return [Text(one_line(cell), style=style) for cell in cells]


def _done(line: LedgerLine, dtype: str | None) -> str:
    if not line.parameter:
        return line.reason
    done = ("dequantized", *line.operations) if line.dequantized else line.operations
    if dtype is None or line.stored in (dtype, SHORT.get(dtype)):
        return ", ".join(done) or "as it is"
    if dtype not in SHORT:  # a block format
        return ", ".join((*done, f"quantized to {dtype}"))
    return ", ".join(done) or f"to {dtype}"


def _statistics(numbers: Numbers) -> list[str]:
    share = 100 * numbers.zeros / numbers.count if numbers.count else 0.0
    values = (numbers.mean, numbers.std, numbers.low, numbers.high)
    zeros = "0" if not share else f"{share:.2g} %" if share >= 0.01 else "<0.01 %"
    return [*map(_number, values), zeros]


def _number(value: float) -> str:
    """Three digits; – where there is none."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def _is_bad(numbers: Numbers | None) -> bool:
    return numbers is not None and numbers.finite < numbers.count


def _bad(numbers: Numbers | None) -> str:
    if numbers is None or not _is_bad(numbers):
        return ""
    above = numbers.infinite - numbers.negative
    kinds = ((numbers.nan, "NaN"), (above, "+∞"), (numbers.negative, "−∞"))
    words = ", ".join(f"{count:,} {word}" for count, word in kinds if count)
    if numbers.first_bad is None:
        return words
    first = " at" if numbers.count - numbers.finite == 1 else ", first at"
    return f"{words}{first} [{','.join(map(str, numbers.first_bad))}]"


def _durations(report: LoadReport) -> Iterator[str]:
    """The time in all, then the stages that take most of it."""
    total = sum(stage.seconds for stage in report.stages)
    yield f"{duration(total)} in all"
    for stage in sorted(report.stages, key=lambda stage: -stage.seconds)[:_LONGEST]:
        if stage.seconds >= 0.01 * total:
            speed = "" if stage.bytes_per_s is None else f" at {unit(stage.bytes_per_s, 'B/s')}"
            yield f"{_WORDS.get(stage.name, stage.name)} {duration(stage.seconds)}{speed}"


def _stages(report: LoadReport) -> Iterator[list[Text]]:
    total = sum(stage.seconds for stage in report.stages)
    for stage in report.stages:
        twice = ", some twice" if (stage.bytes or 0) > report.tensor_bytes else ""
        speed = stage.bytes_per_s
        cells = (
            _WORDS.get(stage.name, stage.name) + (twice if stage.name == "read" else ""),
            duration(stage.seconds),
            f"{100 * stage.seconds / total:.0f} %" if total else "",
            "" if stage.bytes is None else size(stage.bytes),
            "" if speed is None else unit(speed, "B/s"),
        )
        yield [Text(cell) for cell in cells]
    yield [Text(cell, style=HEADING) for cell in ("together", duration(total), "", "", "")]


# verdicts


def verdicts(report: LoadReport) -> Iterator[RenderableType]:
    """What is shared, then what holds and what does not, the numbers and the whole last."""
    for shared in report.shared:
        yield Text(one_line(_shared(shared)), style=FAINT)
    if report.fault:
        yield Marked(BAD, one_line(report.fault), WRONG)
    elif not any(line.parameter for line in report.lines):
        words = "there is no config.json: the model that these tensors belong to is unknown"
        yield Text(words, style=FAINT)
    else:
        yield Marked(GOOD, "every parameter has its tensor, and every tensor its place", FAINT)
    yield from map(_claim, report.claims)
    yield render_checks(report.checks)
    yield from _notes(report)
    if report.not_finite:
        yield Marked(BAD, one_line(report.not_finite), WRONG)
    else:
        words = f"no NaN and no infinity in {counted(report.numbers, 'number')}"
        yield Marked(GOOD, words, FAINT)
    if report.ok:
        yield _verdict(report)


def wrong(report: LoadReport, more: Sequence[str] = ()) -> Iterator[RenderableType]:
    """The verdicts that are not good, else the last one; `more`: options that show the others."""
    if report.fault:
        yield Marked(BAD, one_line(report.fault), WRONG)
    yield from (_claim(claim) for claim in report.claims if not claim.ok)
    failed = [check for check in report.checks if not check.ok]
    if failed:
        yield render_checks(failed)
    if report.not_finite:
        yield Marked(BAD, one_line(report.not_finite), WRONG)
    if report.ok:
        yield _verdict(report, more)


def _notes(report: LoadReport) -> Iterator[RenderableType]:
    """What was not looked at."""
    return (Marked(LABEL, one_line(note), _DOUBTFUL) for note in report.notes)


def _verdict(report: LoadReport, more: Sequence[str] = ()) -> RenderableType:
    tensors = len({line.source for line in report.lines})
    fitted = any(line.parameter for line in report.lines)  # each has its place
    checks = len(report.checks) + len(report.claims) + fitted + 1  # and each is finite
    found = "whole" if report.whole else "readable"
    words = f"{found}: {counted(tensors, 'tensor')}, all numbers finite, {counted(checks, 'check')}"
    return Marked(GOOD, SEPARATOR.join([words, *more]), FAINT)


def _shared(shared: Shared) -> str:
    if shared.kind == "tied":
        return f"{shared.names[0]} is {shared.names[1]}: one matrix of {size(shared.bytes)}"
    names = " and ".join(shared.names[:3])
    more = f" and {len(shared.names) - 3} more" if len(shared.names) > 3 else ""
    return f"{names}{more} hold the same numbers, {size(shared.bytes)} each"


def _claim(claim: MetadataCheck) -> RenderableType:
    what = one_line(claim.what)
    says, holds = one_line(claim.says), one_line(claim.holds)
    if claim.ok:
        there = "" if says == holds else SEPARATOR + holds
        return Marked(GOOD, f"{what}: {says}{there}", FAINT)
    words = f"{what}: {says}, but it is {holds}"
    return Marked(BAD, words, WRONG) if claim.must else Marked(LABEL, words, _DOUBTFUL)
