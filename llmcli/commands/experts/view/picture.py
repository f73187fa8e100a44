"""Which experts tokens take as a PNG for a paper: the choices, and the load of every expert."""

from __future__ import annotations

import numpy as np

from llmcli.commands.experts.report import ExpertsLayer, ExpertsReport
from llmcli.commands.experts.view.export import about
from llmcli.commands.experts.view.screen import share, weight_scale
from llmcli.ui.palette import Scale, rgb
from llmcli.ui.png import (
    FINE,
    FOOT,
    HEAD,
    INK,
    LEAST,
    MARGIN,
    NARROW,
    QUIET,
    SMALL,
    WIDE,
    Colour,
    Sheet,
    bar_width,
    dark,
    fitted,
    label,
    width,
)

MOST = 32  # positions: with more, nothing could be read on paper
TINY = LEAST - 4  # font size of numbers that one can do without
ROW, SPACE = 34, 3  # pixels of a row, and between two cells
KEYS, BETWEEN = 48, 90  # above the choices, and between them and the load
LEFT = MARGIN + 70  # where cells begin: behind the numbers of layers


def experts_png(report: ExpertsReport, title: str) -> bytes:
    """The last `MOST` positions with their experts, coloured by weight; below, what each expert
    was chosen by all positions. `title` names the model.
    """
    first = max(0, len(report.positions) - MOST)
    count, rows = len(report.positions) - first, len(report.layers)
    scale = weight_scale(report)
    digits = round(width(str(max(layer.experts for layer in report.layers) - 1), LEAST)) + 10
    most = max(layer.per_token for layer in report.layers)
    bar = bar_width(scale, SMALL) + 40
    room = (WIDE - LEFT - MARGIN - bar) // count - SPACE
    named = max(1, min(most, max(room, 60) // digits))
    cell = max(60, named * digits) + SPACE
    top = HEAD + KEYS
    load_top = top + rows * ROW + BETWEEN
    right = LEFT + count * cell
    sheet = Sheet(max(NARROW, right + bar + MARGIN), load_top + rows * ROW + 40 + FOOT)
    sheet.headings("Experts: which ones each token takes in every layer", title)
    for row, layer in enumerate(report.layers):
        for begin in (top, load_top):
            middle = begin + row * ROW + (ROW - SPACE) // 2
            sheet.text((LEFT - 14, middle), str(layer.layer), LEAST, QUIET, "rm")
    for column in range(count):
        at = LEFT + column * cell
        position = report.positions[first + column]
        own = fitted(label(*report.tokens[position]), LEAST, cell - SPACE)
        sheet.text((at + cell // 2, HEAD + 6), own, LEAST, INK, "mm")
        sheet.text((at + cell // 2, HEAD + 30), str(position), TINY, QUIET, "mm")
        if first + column == report.from_prompt and column:
            sheet.draw.rectangle(((at - SPACE, HEAD - 8), (at - 1, top + rows * ROW - 4)), INK)
        for row, layer in enumerate(report.layers):
            place = (at, top + row * ROW, cell - SPACE)
            _cell(sheet, layer, first + column, named, place, scale)
    sheet.colour_bar((right + 30, top), max(150, rows * ROW - SPACE), scale, SMALL)
    _loads(sheet, report, load_top)
    words = "numbers: the experts chosen, the largest score first, coloured by what they count"
    if named < most:
        words += f"; the first {named} of {most}"
    if first:
        words += f"; above the last {count} of {len(report.positions)} positions"
    sheet.footer(f"{words}; {about(report.layers[0])}", report.ok)
    return sheet.png()


def _cell(
    sheet: Sheet, layer: ExpertsLayer, place: int, named: int, at: tuple[int, int, int],
    scale: Scale,
) -> None:  # fmt: skip
    """One token in one layer; `at`: left, top, pixels across."""
    left, top, across = at
    shown = min(named, layer.per_token)
    colours = rgb(scale.fractions(layer.weights[place, :shown]))
    for number, expert in enumerate(layer.chosen[place, :shown].tolist()):
        begin, end = (left + across * edge // shown for edge in (number, number + 1))
        _box(sheet, (begin, top), (end - begin, ROW - SPACE), colours[number], str(expert))


def _loads(sheet: Sheet, report: ExpertsReport, top: int) -> None:
    """Layers down, experts across: the share of the tokens that take each, up to the most."""
    words = f"load: how many of {len(report.positions)} tokens take each expert"
    sheet.text((LEFT, top - 44), words, FINE, INK, "ls")
    most = max(layer.experts for layer in report.layers)
    cell = max(6, min(96, (sheet.image.width - LEFT - MARGIN) // most))
    for row, layer in enumerate(report.layers):
        parts = np.array(layer.load) / len(layer.chosen)
        colours = rgb(parts / (parts.max() or 1.0))
        for expert, part in enumerate(parts.tolist()):
            at = (LEFT + expert * cell, top + row * ROW)
            text = share(part) if cell >= 64 else ""
            _box(sheet, at, (cell - 1, ROW - SPACE), colours[expert], text)
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * cell >= 40)
    for expert in range(0, most, step):
        at = (LEFT + expert * cell + cell // 2, top - 16)
        sheet.text(at, str(expert), TINY, QUIET, "mm")


def _box(
    sheet: Sheet, at: tuple[int, int], size: tuple[int, int], colour: np.ndarray, text: str
) -> None:
    """A filled cell with words that can be read on it."""
    fill: Colour = (int(colour[0]), int(colour[1]), int(colour[2]))
    corner = (at[0] + size[0] - 1, at[1] + size[1] - 1)
    sheet.draw.rectangle((at, corner), fill)
    ink = (255, 255, 255) if dark(colour) else INK
    sheet.text((at[0] + size[0] // 2, at[1] + size[1] // 2), text, LEAST, ink, "mm")
