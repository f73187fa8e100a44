"""The tensors of a dump as a table, with statistics of their numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.dump.report import DumpedTensor, DumpReport
from llmcli.records.numbers import counted
from llmcli.ui.layout import BAD, WRONG, Column, Line, Rows
from llmcli.ui.theme import FAINT, HEADING, one_line

MOST = 15  # rows that leave room for the rest on 24 lines: of more, some layers are shown
_BAD = Column("NaN, ±∞")  # where something is not finite


def _number(value: float) -> str:
    """Four digits; – where there is none."""
    return "–" if math.isnan(value) else f"{value:.4g}"


# the name always stays; columns with the largest `drop` go first
_COLUMNS: tuple[tuple[Column, Callable[[DumpedTensor], str]], ...] = (
    (Column("name", right=False), lambda one: one.name),
    (_BAD, lambda one: "0" if one.first_bad is None else f"{one.nan}, {one.inf}"),
    (Column("shape", right=False, drop=2), lambda one: f"[{' '.join(map(str, one.shape))}]"),
    (Column("axes", right=False, drop=8), lambda one: f"[{' '.join(one.axes)}]"),
    (Column("dtype", right=False, drop=7), lambda one: one.dtype),
    (Column("norm", drop=1, labelled=True), lambda one: _number(one.norm)),
    (Column("mean", drop=4, labelled=True), lambda one: _number(one.mean)),
    (Column("std", drop=3, labelled=True), lambda one: _number(one.std)),
    (Column("min", drop=6, labelled=True), lambda one: _number(one.min)),
    (Column("max", drop=5, labelled=True), lambda one: _number(one.max)),
    (Column("formula", right=False, drop=9), lambda one: one.formula),
)


def render_dump(report: DumpReport, model: str, *, every: bool = False) -> RenderableType:
    """A line a tensor, below the model's own line `model`.

    Of many tensors those of some layers, unless `every`, which also has below a row what its
    columns have no room for.
    """
    tensors = report.tensors if every else some_layers(report.tensors)
    columns = [one for one in _COLUMNS if report.not_finite or one[0] is not _BAD]
    rows = []
    for tensor in tensors:
        style = "" if tensor.first_bad is None else WRONG
        rows.append([Text(one_line(cell(tensor)), style) for _, cell in columns])
    new, facts = len(report.tokens) - report.prompt_tokens, [counted(len(report.tensors), "tensor")]
    if report.tokens:
        facts.append(counted(report.prompt_tokens, "token") + (f" and {new} new" if new else ""))
    if not report.not_finite:
        facts.append("no NaN, no infinity")
    return Group(
        Text(one_line(model), style=HEADING),
        Line(facts, FAINT),
        Rows([column for column, _ in columns], rows, below=every),
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


def _notes(report: DumpReport, shown: int) -> Iterator[RenderableType]:
    """Rows left out, masked scores, and the first number that is not finite."""
    if shown < len(report.tensors):
        others = counted(len(report.tensors) - shown, "tensor")
        yield Text(f"… {others} of other layers: --all or --json", style=FAINT)
    masked = sum(tensor.masked for tensor in report.tensors)
    if masked:
        scores = "1 score is" if masked == 1 else f"{masked} scores are"
        yield Text(f"{scores} −∞ (masked keys), not in the statistics", style=FAINT)
    if report.not_finite:
        yield Text(f"{BAD} {one_line(report.not_finite)}", style=WRONG)
