"""The logit lens in the terminal: layers × positions, or one position with everything about it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.lens.report import LensReport
from llmcli.commands.lens.view.grid import Grid, Legend
from llmcli.commands.lens.view.position import Position, headline
from llmcli.ui.checks import render_checks
from llmcli.ui.theme import FAINT, HEADING, one_line

BASIS = (
    "Early layers do not yet write in the basis that the output is read in: their tokens say less "
    "about them than those of the last layers do (Belrose et al. 2023)."
)


def render_lens(
    report: LensReport, title: str, *, ranks: bool = False, whole: str = ""
) -> RenderableType:
    """The grid, or the table of a single position, what its words mean, and the checks.

    `title` is the model's line. A cell of the grid has its likeliest token, or with `ranks` the
    rank of the target. `whole` says what has the positions that it has no room for.
    """
    one = len(report.positions) == 1
    parts: tuple[RenderableType, ...] = (Grid(report, ranks, whole), Legend(report, ranks))
    return Group(
        Text(one_line(title), style=HEADING),
        *((headline(report), Position(report)) if one else parts),
        Text(BASIS, style=FAINT),
        render_checks(report.checks),
    )
