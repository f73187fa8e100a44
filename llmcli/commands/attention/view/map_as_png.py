"""One number of every head as a PNG for a paper: layers down, heads across."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from llmcli.commands.attention.report.heads import AttentionReport, HeadReport, Label
from llmcli.ui.palette import Kind, Scale, rgb
from llmcli.ui.png import (
    FOOT,
    GRID,
    HATCH,
    HEAD,
    INK,
    LEAST,
    MARGIN,
    MASKED,
    NARROW,
    QUIET,
    SMALL,
    WIDE,
    Sheet,
    bar_width,
    dark,
    number,
    width,
)

AXES = 90  # pixels left of the cells and above them
LINE = 40  # of the legend
TALL = 2600  # all cells: a page of a paper


def head_map_png(
    report: AttentionReport, metric: str, title: str, *, kind: Kind = "linear"
) -> bytes:
    """The metric of every head as a PNG file; heads that share keys and values stand together.

    Letters mark the kinds of heads that the report found. A metric without an upper bound has
    the largest value as the end of its scale. Raises KeyError for a metric that it has not.
    """
    about = {known.name: known for known in report.metrics}[metric]
    scale = _scale(report, metric, about.low, about.high, kind)
    most = max(len(layer.heads) for layer in report.layers)
    cell = max(8, min(76, (WIDE - 2 * MARGIN - AXES - 200) // most, TALL // len(report.layers)))
    left, top = MARGIN + AXES, HEAD + AXES
    right = max(_place(layer.heads, len(layer.heads) - 1, cell) for layer in report.layers)
    down = left, top + len(report.layers) * cell
    legend = [
        f"{kind.letter}  {kind.name}: {kind.metric} at least {kind.threshold:g}"
        for kind in _found(report)
    ]
    sheet = Sheet(
        max(NARROW, left + right + cell + 50 + bar_width(scale, SMALL) + MARGIN),
        down[1] + 36 + LINE * len(legend) + FOOT,
    )
    sheet.headings(f"{about.words[:1].upper()}{about.words[1:]}", title)
    _axes(sheet, report, (left, top), cell)
    for row, layer in enumerate(report.layers):
        for column, head in enumerate(layer.heads):
            at = left + _place(layer.heads, column, cell), top + row * cell
            _cell(sheet, at, cell, head, scale, metric, report.labels)
    bar = min(700, max(160, len(report.layers) * cell))
    sheet.colour_bar((left + right + cell + 50, top), bar, scale, SMALL)
    for line, words in enumerate(legend):
        sheet.text((left, down[1] + 36 + LINE * line), words, SMALL, QUIET)
    sheet.footer(
        f"{about.formula}; {kind} scale; gaps part heads that share keys and values", report.ok
    )
    return sheet.png()


def _scale(
    report: AttentionReport, metric: str, low: float, high: float | None, kind: Kind
) -> Scale:
    values = [head.metrics[metric] for layer in report.layers for head in layer.heads]
    most = max((value for value in values if math.isfinite(value)), default=1.0)
    return Scale(low=low, high=(most or 1.0) if high is None else high, kind=kind)


def _place(heads: tuple[HeadReport, ...], column: int, cell: int) -> int:
    """Pixels left of a head: the cells before it and a gap between two groups."""
    parted = sum(one.kv_head != other.kv_head for one, other in pairwise(heads[: column + 1]))
    grouped = len({head.kv_head for head in heads}) < len(heads)
    return column * cell + (parted * max(3, cell // 6) if grouped else 0)


def _axes(sheet: Sheet, report: AttentionReport, at: tuple[int, int], cell: int) -> None:
    """Numbers of layers and heads, as many as have room, and what they are."""
    x, y = at
    longest = max((layer.heads for layer in report.layers), key=len)
    size = min(SMALL, max(LEAST, cell // 2))
    for row in range(0, len(report.layers), math.ceil(size * 1.2 / cell)):
        middle = y + row * cell + cell // 2
        sheet.text((x - 14, middle), str(report.layers[row].layer), size, INK, "rm")
    for column in range(0, len(longest), math.ceil(size * 1.6 / cell)):
        middle = x + _place(longest, column, cell) + cell // 2
        sheet.text((middle, y - 12), str(longest[column].head), size, INK, "ms")
    sheet.turned((MARGIN + 12, y), "layer", LEAST, QUIET)
    sheet.text((x, y - AXES + 34), "head", LEAST, QUIET, "ls")


def _cell(
    sheet: Sheet,
    at: tuple[int, int],
    cell: int,
    head: HeadReport,
    scale: Scale,
    metric: str,
    labels: tuple[Label, ...],
) -> None:
    """A head's colour, its value where a number has room, and the letters of its kinds."""
    value = head.metrics[metric]
    box = (at, (at[0] + cell - 2, at[1] + cell - 2))
    if math.isnan(value):
        sheet.draw.rectangle(box, MASKED, GRID)
        sheet.draw.line((at[0], at[1] + cell - 2, at[0] + cell - 2, at[1]), HATCH, 2)
        return
    colour = rgb(scale.fractions(np.array(value)))
    sheet.draw.rectangle(box, (int(colour[0]), int(colour[1]), int(colour[2])))
    fill = (255, 255, 255) if dark(colour) else INK
    letters = "".join(kind.letter for kind in labels if kind.name in head.labels)
    words = number(value) if abs(value) < 0.995 else f"{value:.1f}" if value < math.inf else "inf"
    if cell >= 56:
        words = f"{value:.2f}".lstrip("0") if 0 <= value < 0.995 else words
        middle = at[1] + cell // 2 + (11 if letters else 0)
        if width(words, LEAST) < cell - 6:
            sheet.text((at[0] + cell // 2, middle), words, LEAST, fill, "mm")
        sheet.text((at[0] + cell // 2, at[1] + cell // 2 - 13), letters, SMALL, fill, "mm")
    elif letters and cell >= 24:
        sheet.text((at[0] + cell // 2, at[1] + cell // 2), letters[:1], LEAST, fill, "mm")


def _found(report: AttentionReport) -> list[Label]:
    found = {name for layer in report.layers for head in layer.heads for name in head.labels}
    return [kind for kind in report.labels if kind.name in found]
