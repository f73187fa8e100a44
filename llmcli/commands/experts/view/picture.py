"""Which experts tokens take as a PNG for a paper: the choices, and the load of every expert."""

from __future__ import annotations

import numpy as np

from llmcli.commands.experts.report import ExpertsReport
from llmcli.commands.experts.view.export import about
from llmcli.commands.experts.view.screen import share, weight_scale
from llmcli.ui.png import (
    BOX_GAP,
    FINE,
    FOOT,
    INK,
    LEAST,
    MARGIN,
    MOST_TOKENS,
    NARROW,
    QUIET,
    ROW,
    SMALL,
    TINY,
    TOP,
    WIDE,
    Sheet,
    TokenGrid,
    bar_width,
    width,
)

BETWEEN = 90  # pixels between the choices and the load
LEFT = MARGIN + 70  # where boxes begin: behind the numbers of layers


def experts_png(report: ExpertsReport, title: str) -> bytes:
    """The last positions with their experts, coloured by weight; below, what each expert was
    chosen by all positions. `title` names the model.
    """
    first = max(0, len(report.positions) - MOST_TOKENS)
    positions, layers = report.positions[first:], report.layers
    scale = weight_scale(report)
    digits = round(width(str(max(layer.experts for layer in layers) - 1), LEAST)) + 10
    most = max(layer.per_token for layer in layers)
    bar = bar_width(scale, SMALL) + 40
    room = (WIDE - LEFT - MARGIN - bar) // len(positions) - BOX_GAP
    named = max(1, min(most, max(room, 60) // digits))

    def cell(row: int, column: int) -> list[tuple[float, str]]:
        layer, at = layers[row], first + column
        places = scale.fractions(layer.weights[at, :named]).tolist()
        return list(zip(places, map(str, layer.chosen[at, :named].tolist()), strict=True))

    grid = TokenGrid(
        left=LEFT, across=max(60, named * digits) + BOX_GAP, positions=positions,
        names=[str(layer.layer) for layer in layers], cell=cell,
        tokens=[report.tokens[position] for position in positions],
        written=report.from_prompt - first or -1,
    )  # fmt: skip
    load_top = grid.bottom + BETWEEN
    sheet = Sheet(max(NARROW, grid.right + bar + MARGIN), load_top + len(layers) * ROW + 40 + FOOT)
    sheet.headings("Experts: which ones each token takes in every layer", title)
    grid.draw(sheet)
    grid.names_at(sheet, load_top)
    height = max(150, len(layers) * ROW - BOX_GAP)
    sheet.colour_bar((grid.right + 30, TOP), height, scale, SMALL)
    _loads(sheet, report, load_top)
    words = "numbers: the experts chosen, the largest score first, coloured by what they count"
    if named < most:
        words += f"; the first {named} of {most}"
    if first:
        words += f"; above the last {len(positions)} of {len(report.positions)} positions"
    sheet.footer(f"{words}; {about(layers[0])}", report.ok)
    return sheet.png()


def _loads(sheet: Sheet, report: ExpertsReport, top: int) -> None:
    """Layers down, experts across: the share of the tokens that take each, up to the most."""
    words = f"load: how many of {len(report.positions)} tokens take each expert"
    sheet.text((LEFT, top - 44), words, FINE, INK, "ls")
    most = max(layer.experts for layer in report.layers)
    cell = max(6, min(96, (sheet.image.width - LEFT - MARGIN) // most))
    for row, layer in enumerate(report.layers):
        parts = np.array(layer.load) / len(layer.chosen)
        for expert, part in enumerate(parts.tolist()):
            at, text = (LEFT + expert * cell, top + row * ROW), share(part) if cell >= 64 else ""
            sheet.box(at, (cell - 1, ROW - BOX_GAP), part / (parts.max() or 1.0), text)
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * cell >= 40)
    for expert in range(0, most, step):
        at = (LEFT + expert * cell + cell // 2, top - 16)
        sheet.text(at, str(expert), TINY, QUIET, "mm")
