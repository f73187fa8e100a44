"""The derivation of one rung, step by step, with the prompt's own numbers."""

from __future__ import annotations

import math

from rich.console import RenderableType
from rich.text import Text

from llmcli.render.ladder import _change, _heading, _moved, _shape, _verdict, listed
from llmcli.render.theme import FAINT, HEADING, NUMBER
from llmcli.reports.ladder import LadderReport, RungReport, Shown


def render_rung(rung: RungReport, report: LadderReport, model: str) -> list[RenderableType]:
    """One rung's derivation: why it gives the same numbers, and each step with its numbers."""
    parts: list[RenderableType] = [*_heading(report, model), "", *_change(rung, shapes=False), ""]
    parts.append(Text(rung.idea))
    for step in rung.steps:
        parts += ["", *_step(step)]
    if rung.difference is not None:
        parts += ["", _verdict(rung)]
    return parts


def _step(step: Shown) -> list[RenderableType]:
    """A step's formula and shape, and its numbers or their upper left corner."""
    if step.source is not None:
        head = Text.assemble(_moved(step), "  ", _shape(step, step.formula))
    else:
        head = Text.assemble((step.formula, HEADING), (f"  {listed(step.shape)}", NUMBER))
    lines: list[RenderableType] = [head]
    rows, columns = (1, *step.shape)[-2:] if step.shape else (1, 1)
    cut = len(step.values[0]) < columns if step.values else False
    for row in step.values:
        cells = "".join(f"{_number(value):>11}" for value in row)
        lines.append(Text(cells + (" …" if cut else ""), no_wrap=True))
    if len(step.values) < rows:
        lines.append(Text(f"{'⋮':>11}", style=FAINT))
    return lines


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.4g}"
