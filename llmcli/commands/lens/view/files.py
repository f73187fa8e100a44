"""The logit lens as a page with every cell in full, and as a PNG for a paper.

Layers down, positions across, the likeliest token in each. Same order as in the terminal: the
embedding first, the model's own output last.
"""

from __future__ import annotations

import math

from llmcli.commands.lens.report import LensCell, LensReport, short_name
from llmcli.ui import png
from llmcli.ui.page.build import checks, finite, page, token
from llmcli.ui.palette import Scale
from llmcli.ui.theme import quoted

FINAL = 88  # pixels below the rows
BELOW = (22, 52)  # pixels below the rows: where they settle, and the targets
SCALE = Scale(low=0.0, high=1.0)
DIGITS = 6  # of a number in the page


def lens_page(report: LensReport, title: str) -> bytes:
    """The whole report as one HTML file. `title` names the model."""
    texts = {one.id: one.text for row in report.rows for cell in row.cells for one in cell.top}
    texts |= {target.id: target.text for target in report.targets}
    divergences = [cell.kl for row in report.rows for cell in row.cells if math.isfinite(cell.kl)]
    data = {
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "vocabulary": report.vocabulary,
        "tokens": [token(one) for one in report.tokens],
        "prompt_tokens": report.prompt_tokens,
        "positions": report.positions,
        "target": report.target,
        "targets": [{"id": one.id} for one in report.targets],
        "texts": {id: quoted(text)[1:-1] for id, text in texts.items()},
        "rows": [
            {
                "name": long_name(row.name),
                "full": row.name,
                "layer": row.layer,
                "cells": [_cell(cell) for cell in row.cells],
            }
            for row in report.rows
        ],
        "settled": [long_name(name) for name in report.settled],
        "most_kl": max(divergences, default=0.0),
        "checks": checks(report.checks),
    }
    return page("lens", f"Logit lens: {title}", data)


def _cell(cell: LensCell) -> list[float | int | None]:
    """Entropy, KL, rank and probability of the target, then the likeliest tokens in pairs."""
    first = [finite(cell.entropy, DIGITS), finite(cell.kl, DIGITS), cell.target_rank]
    pairs = [part for one in cell.top for part in (one.id, finite(one.probability, DIGITS))]
    return [*first, finite(cell.target_probability, DIGITS), *pairs]


def long_name(name: str) -> str:
    """`embedding`, `3 mid` and `3`: there is room for the word."""
    return short_name(name, embedding="embedding")


def lens_png(report: LensReport, title: str) -> bytes:
    """The grid as a PNG file: the last positions, coloured by probability.

    A line marks the row from which on the output's token is the likeliest in every layer, where
    that row is shown; another stands before what the model wrote. `title` names the model.
    """
    first = max(0, len(report.positions) - png.MOST_TOKENS)
    positions = report.positions[first:]
    names = [long_name(row.name) for row in report.rows]
    left = png.MARGIN + round(max(png.width(name, png.LEAST) for name in (*names, "settled"))) + 16
    bar = 40 + png.bar_width(SCALE, png.SMALL)
    room = png.WIDE - left - png.MARGIN - bar
    across = max(100, min(170, room // len(positions)))

    def cell(row: int, column: int) -> list[tuple[float, str]]:
        token = report.rows[row].cells[first + column].top[0]
        words = png.fitted(png.label(token), png.LEAST, across - png.BOX_GAP - 8)
        return [(token.probability, words)]

    grid = png.TokenGrid(
        left=left, across=across, names=names, columns=len(positions), cell=cell,
        tokens=[report.tokens[position] for position in positions], positions=positions,
        written=report.from_prompt - first,
    )  # fmt: skip
    width = max(png.NARROW, grid.right + bar + png.MARGIN)
    sheet = png.Sheet(width, grid.bottom + FINAL + png.FOOT)
    sheet.headings("Logit lens: the likeliest token after each layer", title)
    grid.draw(sheet)
    ends = [grid.bottom + below for below in BELOW]
    for y, words in zip((png.HEAD + 18, *ends), ("reads", "settled", "target"), strict=True):
        sheet.text((left - 12, y), words, png.LEAST, png.QUIET, "rm")
    for column in range(len(positions)):
        _below(sheet, grid, report, first, column)
    sheet.colour_bar((grid.right + 40, png.TOP), min(700, grid.bottom - png.TOP), SCALE, png.SMALL)
    words = f"target: {report.target}; settled, red line: from here on the output's token stays "
    words += "the likeliest"
    if report.from_prompt < len(report.positions):
        words += f"; the model wrote the tokens from position {report.prompt_tokens} on"
    if first:
        words += f"; the last {len(positions)} of {len(report.positions)} positions"
    sheet.footer(words, report.ok)
    return sheet.png()


def _below(
    sheet: png.Sheet, grid: png.TokenGrid, report: LensReport, first: int, column: int
) -> None:
    """Where a column settles, in words and as a line above its row, and its target."""
    settled, target = report.settled[first + column], report.targets[first + column]
    for row, values in enumerate(report.rows):
        if values.name == settled:
            x, y = grid.corner(row, column)
            line = (x, y - png.BOX_GAP), (x + grid.across - png.BOX_GAP - 1, y - 1)
            sheet.draw.rectangle(line, png.RED)
    both = long_name(settled), png.label(target)
    for below, text in zip(BELOW, both, strict=True):
        grid.words(sheet, column, grid.bottom + below, text)
