"""How a model was loaded: its ledger as a table, the time, and what the file says of itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.load.report import LedgerLine, LoadReport, Numbers
from llmcli.commands.load.view.verdicts import verdicts, wrong
from llmcli.reports.numbers import counted
from llmcli.ui.checks import WRONG
from llmcli.ui.layout import Column, Dotted, Rows
from llmcli.ui.rates import unit
from llmcli.ui.stats import SHORT, duration, size
from llmcli.ui.theme import FAINT, HEADING, one_line

# the first two stay whatever the width; those with the largest number go below their row first
_LEDGER = (
    Column("parameter", right=False),
    Column("tensor", right=False, first_to_go=1),
    Column("stored", right=False, first_to_go=2),
    Column("in the file", first_to_go=8),
    Column("what was done", right=False, first_to_go=3),
    Column("mean", first_to_go=7, labelled=True),
    Column("std", first_to_go=6, labelled=True),
    Column("min", first_to_go=5, labelled=True),
    Column("max", first_to_go=5, labelled=True),
    Column("zeros", first_to_go=7, labelled=True),
)
_BAD = Column("NaN, ±∞", right=False)  # stays, too, where something is not finite
_STAGES = (
    Column("stage", right=False),
    Column("time"),
    Column("share", first_to_go=2),
    Column("bytes", first_to_go=1),
    Column("speed", first_to_go=1),
)
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
    report: LoadReport, model: str, lines: Sequence[LedgerLine], *, brief: bool = False
) -> RenderableType:
    """`lines` as a table, then stages and verdicts; `model` is its line.

    `brief`: of the rest no more than what is wrong, and the last verdict.
    """
    columns, rows = list(_LEDGER), [_row(line, line.dtype or report.dtype) for line in lines]
    if any(_is_bad(line.numbers) for line in lines):
        columns.insert(2, _BAD)
        for row, line in zip(rows, lines, strict=True):
            row.insert(2, Text(_bad(line.numbers), style=row[0].style))
    table = Rows(columns, rows, spill=True)
    if brief:
        return Group(Text(one_line(model), style=HEADING), table, *wrong(report))
    return Group(
        Text(one_line(model), style=HEADING),
        Dotted(list(_facts(report)), FAINT),
        Text(""),
        table,
        Text(""),
        Rows(_STAGES, list(_stages(report))),
        Text(""),
        *verdicts(report),
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
        yield f"{counted(report.looked_at, 'parameter')}, {size(report.weight_bytes)} of memory"
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
    told = ", ".join(f"{count:,} {word}" for count, word in kinds if count)
    if numbers.first_bad is None:
        return told
    first = " at" if numbers.count - numbers.finite == 1 else ", first at"
    return f"{told}{first} [{','.join(map(str, numbers.first_bad))}]"


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
