"""The tensors of a dump as a table: what they are, and what their numbers are like."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.dump.report import DumpedTensor, DumpReport
from llmcli.records.numbers import counted
from llmcli.ui.checks import BAD, WRONG
from llmcli.ui.layout import Column, Dotted, Rows
from llmcli.ui.theme import FAINT, HEADING, one_line

MOST = 15  # rows that leave room for the rest on 24 lines: of more, some layers are shown

# the name stays whatever the width; those with the largest number go first
_COLUMNS = (
    Column("name", right=False),
    Column("NaN, ±∞"),
    Column("shape", right=False, drop=2),
    Column("axes", right=False, drop=8),
    Column("dtype", right=False, drop=7),
    Column("norm", drop=1, labelled=True),
    Column("mean", drop=4, labelled=True),
    Column("std", drop=3, labelled=True),
    Column("min", drop=6, labelled=True),
    Column("max", drop=5, labelled=True),
    Column("formula", right=False, drop=9),
)
_BAD = 1  # is there only where something is not finite


def render_dump(report: DumpReport, model: str, *, every: bool = False) -> RenderableType:
    """A line a tensor; `model` is its line.

    Of many tensors those of some layers, unless `every`, which also has below a row what its
    columns have no room for.
    """
    tensors = report.tensors if every else some_layers(report.tensors)
    at = [n for n in range(len(_COLUMNS)) if n != _BAD or report.not_finite]
    rows = [[cell for n, cell in enumerate(_row(tensor)) if n in at] for tensor in tensors]
    return Group(
        Text(one_line(model), style=HEADING),
        Dotted(list(_facts(report)), FAINT),
        Rows([_COLUMNS[n] for n in at], rows, spill=every),
        *_notes(report, len(tensors)),
    )


def some_layers(tensors: Sequence[DumpedTensor]) -> Sequence[DumpedTensor]:
    """About `MOST` of them: of what repeats in every layer some, evenly spread, at least two.

    And all that are not finite.
    """
    if len(tensors) <= MOST:
        return tensors
    repeated: dict[str, list[DumpedTensor]] = {}
    for tensor in tensors:
        repeated.setdefault(re.sub(r"^(blocks|cache)\.\d+", r"\1", tensor.name), []).append(tensor)
    single = sum(len(group) == 1 for group in repeated.values())
    each = max(2, (MOST - single) // max(1, len(repeated) - single))
    kept = {tensor.name for tensor in tensors if tensor.first_bad is not None}
    for group in repeated.values():
        count = min(each, len(group))
        places = {round(n * (len(group) - 1) / max(1, count - 1)) for n in range(count)}
        kept |= {group[place].name for place in places}
    return [tensor for tensor in tensors if tensor.name in kept]


def _facts(report: DumpReport) -> Iterator[str]:
    yield counted(len(report.tensors), "tensor")
    new = len(report.tokens) - report.prompt_tokens
    if report.tokens:
        yield counted(report.prompt_tokens, "token") + (f" and {new} new" if new else "")
    if not report.not_finite:
        yield "no NaN, no infinity"


def _row(tensor: DumpedTensor) -> list[Text]:
    cells = [
        tensor.name,
        "0" if tensor.first_bad is None else f"{tensor.nan}, {tensor.infinite}",
        f"[{' '.join(map(str, tensor.shape))}]",
        f"[{' '.join(tensor.axes)}]",
        tensor.dtype,
        *map(_number, (tensor.norm, tensor.mean, tensor.std, tensor.low, tensor.high)),
        tensor.formula,
    ]
    style = "" if tensor.first_bad is None else WRONG
    return [Text(one_line(cell), style=style) for cell in cells]


def _notes(report: DumpReport, shown: int) -> Iterator[RenderableType]:
    """What the table does not say of its rows."""
    if shown < len(report.tensors):
        others = counted(len(report.tensors) - shown, "tensor")
        yield Text(f"… {others} of other layers: --all or --json", style=FAINT)
    masked = sum(tensor.masked for tensor in report.tensors)
    if masked:
        scores = "1 score is" if masked == 1 else f"{masked} scores are"
        yield Text(f"{scores} −∞ (masked keys), not in the statistics", style=FAINT)
    if report.not_finite:
        yield Text(f"{BAD} {one_line(report.not_finite)}", style=WRONG)


def _number(value: float) -> str:
    """Four digits; – where there is none."""
    return "–" if math.isnan(value) else f"{value:.4g}"
