"""The logit lens as a PNG for a paper: layers down, positions across, the likeliest token in each.

Same order as in the terminal: the embedding first, the model's own output last.
"""

from __future__ import annotations

import numpy as np

from llmcli.commands.lens.report import LensReport
from llmcli.ui.palette import Scale, rgb
from llmcli.ui.png import (
    FOOT,
    HEAD,
    INK,
    LEAST,
    MARGIN,
    NARROW,
    QUIET,
    RED,
    SMALL,
    WIDE,
    Sheet,
    bar_width,
    dark,
    fitted,
    label,
    width,
)
from llmcli.ui.token_text import EMBEDDING, short

MOST = 32  # positions: with more, nothing could be read on paper
ROW, SPACE = 36, 3  # pixels of a row of cells, and between two cells
KEYS, FINAL = 44, 88  # above the rows, and below them
BELOW = (22, 52)  # pixels below the rows: where they settle, and the targets
SCALE = Scale(low=0.0, high=1.0)


def lens_png(report: LensReport, title: str) -> bytes:
    """The grid as a PNG file: the last `MOST` positions, coloured by probability.

    A line marks the row from which on the output's token is the likeliest in every layer, where
    that row is shown; another stands before what the model wrote. `title` names the model.
    """
    first = max(0, len(report.positions) - MOST)
    count = len(report.positions) - first
    names = [short(row.name, embedding=EMBEDDING) for row in report.rows]
    left = MARGIN + round(max(width(name, LEAST) for name in (*names, "settled"))) + 16
    bar = bar_width(SCALE, SMALL)
    cell = max(100, min(170, (WIDE - left - MARGIN - bar - 40) // count))
    top = HEAD + KEYS
    bottom = top + ROW * len(report.rows)
    sheet = Sheet(max(NARROW, left + cell * count + 40 + bar + MARGIN), bottom + FINAL + FOOT)
    sheet.headings("Logit lens: the likeliest token after each layer", title)
    for row, name in enumerate(names):
        sheet.text((left - 12, top + row * ROW + ROW // 2), name, LEAST, QUIET, "rm")
    for column in range(count):
        at = left + column * cell
        _column(sheet, report, first + column, (at, top), cell)
        if first + column == report.from_prompt:
            sheet.draw.rectangle(((at - SPACE, HEAD - 8), (at - 1, bottom - SPACE - 1)), INK)
    sheet.text((left - 12, HEAD + 18), "reads", LEAST, QUIET, "rm")
    for below, words in zip(BELOW, ("settled", "target"), strict=True):
        sheet.text((left - 12, bottom + below), words, LEAST, QUIET, "rm")
    right = left + cell * count + 40
    sheet.colour_bar((right, top), min(700, bottom - top), SCALE, SMALL)
    words = f"target: {report.target}; settled, red line: from here on the output's token stays "
    words += "the likeliest"
    if report.from_prompt < len(report.positions):
        words += f"; the model wrote the tokens from position {report.prompt_tokens} on"
    if first:
        words += f"; the last {count} of {len(report.positions)} positions"
    sheet.footer(words, report.ok)
    return sheet.png()


def _column(sheet: Sheet, report: LensReport, place: int, at: tuple[int, int], cell: int) -> None:
    """One position: its own token above, the rows, the target below."""
    x, y = at
    middle, room = x + (cell - SPACE) // 2, cell - SPACE - 8
    position = report.positions[place]
    own = fitted(label(*report.tokens[position]), LEAST, room)
    sheet.text((middle, HEAD + 6), own, LEAST, INK, "mm")
    sheet.text((middle, HEAD + 30), str(position), LEAST - 4, QUIET, "mm")
    for row, values in enumerate(report.rows):
        token = values.cells[place].top[0]
        colour = rgb(np.array(token.probability))
        fill = (int(colour[0]), int(colour[1]), int(colour[2]))
        low = y + row * ROW
        sheet.draw.rectangle(((x, low), (x + cell - SPACE - 1, low + ROW - SPACE - 1)), fill)
        words = fitted(label(token.id, token.text), LEAST, room)
        ink = (255, 255, 255) if dark(colour) else INK
        sheet.text((middle, low + (ROW - SPACE) // 2), words, LEAST, ink, "mm")
        if values.name == report.settled[place]:
            sheet.draw.rectangle(((x, low - SPACE), (x + cell - SPACE - 1, low - 1)), RED)
    target = report.targets[place]
    both = short(report.settled[place], embedding=EMBEDDING), label(target.id, target.text)
    for below, text in zip(BELOW, both, strict=True):
        at_y = y + len(report.rows) * ROW + below
        sheet.text((middle, at_y), fitted(text, LEAST, room), LEAST, INK, "mm")
