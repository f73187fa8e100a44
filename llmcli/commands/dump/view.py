"""The tensors of a dump as a table: what they are, and what their numbers are like."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.dump.report import DumpedTensor, DumpReport
from llmcli.reports.numbers import counted
from llmcli.ui.checks import BAD, WRONG, render_checks
from llmcli.ui.layout import Column, Dotted, Rows
from llmcli.ui.stats import size
from llmcli.ui.theme import FAINT, HEADING, one_line

# the name stays whatever the width; those with the largest number go below it first
_COLUMNS = (
    Column("name", right=False),
    Column("shape", right=False, first_to_go=1),
    Column("NaN, ±∞", first_to_go=6, labelled=True),
    Column("axes", right=False, first_to_go=8),
    Column("dtype", right=False, first_to_go=7),
    Column("mean", first_to_go=2, labelled=True),
    Column("std", first_to_go=3, labelled=True),
    Column("min", first_to_go=5, labelled=True),
    Column("max", first_to_go=5, labelled=True),
    Column("norm", first_to_go=4, labelled=True),
    Column("formula", right=False, first_to_go=9),
)
_BAD = 2  # stays, too, where something is not finite


def render_dump(
    report: DumpReport, model: str, *, file: tuple[str, int] | None = None
) -> RenderableType:
    """A line a tensor, then the checks; `model` is its line, `file` what was written: its bytes."""
    columns = list(_COLUMNS)
    rows = [_row(tensor) for tensor in report.tensors]
    if any(tensor.first_bad is not None for tensor in report.tensors):
        columns[_BAD] = replace(columns[_BAD], first_to_go=0)
    footer = [*_notes(report), *([render_checks(report.checks)] if report.checks else [])]
    if report.not_finite:
        footer.append(Text(f"{BAD} {one_line(report.not_finite)}", style=WRONG))
    return Group(
        Text(one_line(model), style=HEADING),
        Dotted(list(_facts(report, file)), FAINT),
        Text(""),
        Rows(columns, rows, spill=True),
        *([Text(""), *footer] if footer else []),
    )


def _facts(report: DumpReport, file: tuple[str, int] | None) -> Iterator[str]:
    yield counted(len(report.tensors), "tensor")
    new = len(report.tokens) - report.prompt_tokens
    if report.tokens:
        yield counted(report.prompt_tokens, "token") + (f" and {new} new" if new else "")
    if file is not None:
        yield f"in {one_line(file[0])}, {size(file[1])}"


def _row(tensor: DumpedTensor) -> list[Text]:
    cells = [
        tensor.name,
        f"[{' '.join(map(str, tensor.shape))}]",
        "0" if tensor.first_bad is None else f"{tensor.nan}, {tensor.infinite}",
        f"[{' '.join(tensor.axes)}]",
        tensor.dtype,
        *map(_number, (tensor.mean, tensor.std, tensor.low, tensor.high, tensor.norm)),
        tensor.formula,
    ]
    style = "" if tensor.first_bad is None else WRONG
    return [Text(one_line(cell), style=style) for cell in cells]


def _notes(report: DumpReport) -> Iterator[RenderableType]:
    """What the table does not say of its rows."""
    masked = sum(tensor.masked for tensor in report.tensors)
    if masked:
        scores = "1 score is" if masked == 1 else f"{masked} scores are"
        words = f"{scores} −∞, of keys that may not be seen, and not in the statistics"
        yield Text(words, style=FAINT)


def _number(value: float) -> str:
    """Four digits; – where there is none."""
    return "–" if math.isnan(value) else f"{value:.4g}"
