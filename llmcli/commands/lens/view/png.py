"""The logit lens as a PNG for a paper: layers down, positions across, the likeliest token in each.

Same order as in the terminal: the embedding first, the model's own output last.
"""

from __future__ import annotations

from llmcli.commands.lens.report import EMBEDDING, LensReport, short_name
from llmcli.ui.palette import Scale
from llmcli.ui.png import (
    BOX_GAP,
    FOOT,
    HEAD,
    LEAST,
    MARGIN,
    MOST_TOKENS,
    NARROW,
    QUIET,
    RED,
    SMALL,
    TOP,
    WIDE,
    Sheet,
    TokenGrid,
    bar_width,
    label,
    width,
)

FINAL = 88  # pixels below the rows
BELOW = (22, 52)  # pixels below the rows: where they settle, and the targets
SCALE = Scale(low=0.0, high=1.0)


def lens_png(report: LensReport, title: str) -> bytes:
    """The grid as a PNG file: the last positions, coloured by probability.

    A line marks the row from which on the output's token is the likeliest in every layer, where
    that row is shown; another stands before what the model wrote. `title` names the model.
    """
    first = max(0, len(report.positions) - MOST_TOKENS)
    positions = report.positions[first:]
    names = [short_name(row.name, embedding=EMBEDDING) for row in report.rows]
    left = MARGIN + round(max(width(name, LEAST) for name in (*names, "settled"))) + 16
    bar = bar_width(SCALE, SMALL)

    def cell(row: int, column: int) -> list[tuple[float, str]]:
        token = report.rows[row].cells[first + column].top[0]
        return [(token.probability, label(token))]

    grid = TokenGrid(
        left=left, across=max(100, min(170, (WIDE - left - MARGIN - bar - 40) // len(positions))),
        names=names, tokens=[report.tokens[position] for position in positions],
        positions=positions, written=report.from_prompt - first, cell=cell,
    )  # fmt: skip
    sheet = Sheet(max(NARROW, grid.right + 40 + bar + MARGIN), grid.bottom + FINAL + FOOT)
    sheet.headings("Logit lens: the likeliest token after each layer", title)
    grid.draw(sheet)
    ends = [grid.bottom + below for below in BELOW]
    for y, words in zip((HEAD + 18, *ends), ("reads", "settled", "target"), strict=True):
        sheet.text((left - 12, y), words, LEAST, QUIET, "rm")
    for column in range(len(positions)):
        _below(sheet, grid, report, first, column)
    sheet.colour_bar((grid.right + 40, TOP), min(700, grid.bottom - TOP), SCALE, SMALL)
    words = f"target: {report.target}; settled, red line: from here on the output's token stays "
    words += "the likeliest"
    if report.from_prompt < len(report.positions):
        words += f"; the model wrote the tokens from position {report.prompt_tokens} on"
    if first:
        words += f"; the last {len(positions)} of {len(report.positions)} positions"
    sheet.footer(words, report.ok)
    return sheet.png()


def _below(sheet: Sheet, grid: TokenGrid, report: LensReport, first: int, column: int) -> None:
    """Where a column settles, in words and as a line above its row, and its target."""
    settled, target = report.settled[first + column], report.targets[first + column]
    for row, values in enumerate(report.rows):
        if values.name == settled:
            x, y = grid.corner(row, column)
            sheet.draw.rectangle(((x, y - BOX_GAP), (x + grid.across - BOX_GAP - 1, y - 1)), RED)
    both = short_name(settled, embedding=EMBEDDING), label(target)
    for below, text in zip(BELOW, both, strict=True):
        grid.words(sheet, column, grid.bottom + below, text)
