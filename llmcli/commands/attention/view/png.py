"""Attention as a PNG for a paper: the matrices of chosen heads, or one number of every head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from llmcli.commands.attention.report import AttentionReport, HeadReport
from llmcli.commands.attention.view.map import scale_of
from llmcli.commands.attention.view.screen import layer_notes, matrix_scale
from llmcli.records.attention import Matrix
from llmcli.ui.numbers import tick
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
    fitted,
    label,
    width,
)

GAP = 30  # between two matrices
NAME = 46  # above a matrix: which head it is
LONGEST = 300  # pixels of a token's label
LARGEST = 1560  # pixels of a matrix from above to below
AXES = 90  # pixels left of the cells and above them
LINE = 40  # of the legend
TALL = 2600  # all cells: a page of a paper


def attention_png(report: AttentionReport, title: str, *, kind: Kind = "linear") -> bytes:
    """The report's matrices side by side, on one scale, as a PNG file.

    A pattern's scale is always 0 to 1, so that heads can be compared; scores, and weights with
    signs, have the largest of all in the picture. `title` names the model. Raises ValueError where
    there is no matrix.
    """
    if not report.matrices:
        raise ValueError("no matrix to draw")
    scale, figure = matrix_scale(report, kind), _Figure(report)
    right = figure.corner(figure.across - 1)[0] + figure.wide + 40
    sheet = Sheet(
        max(NARROW, right + bar_width(scale, SMALL) + MARGIN),
        figure.corner(figure.count - 1)[1] + figure.high + figure.foot + FOOT,
    )
    first, which = report.matrices[0], " of chosen heads"
    if figure.count == 1:
        which = f", layer {first.layer} head {first.head}"
    scores = " scores" * (report.what == "scores")
    sheet.headings(f"Attention{scores}{which}", title)
    for place, matrix in enumerate(report.matrices):
        figure.draw(sheet, place, matrix, scale)
    sheet.colour_bar((right, figure.corner(0)[1]), min(figure.high, 900), scale, SMALL)
    words = ["queries down, keys across", f"{kind} scale"]
    if first.pool > 1:
        either = " of either sign" * first.signed
        words.append(f"1 cell is the largest{either} of {first.pool} x {first.pool}")
    words.append(f"computed in {report.dtype}")
    words += [note.replace("; ", ", ") for note in layer_notes(report)]
    sheet.footer("; ".join(words), report.ok)
    return sheet.png()


class _Figure:
    """Where the matrices stand, `across` in a row; all show the same queries and keys.

    Cells are the largest with which all matrices fit a page's width. Labels are written once:
    queries left of a row, keys below a column.
    """

    def __init__(self, report: AttentionReport) -> None:
        self.count, first = len(report.matrices), report.matrices[0]
        rows, columns = first.values.shape
        few = min(self.count, 3) if self.count < 10 else 4
        self.across = {4: 2, 7: 4, 8: 4}.get(self.count, few)
        self.size = size = SMALL if self.count == 1 else LEAST
        longest = LONGEST if self.count == 1 else 2 * LONGEST // 3
        labels = [fitted(label(token), size, longest) for token in report.tokens]
        used = labels[slice(*first.keys)] + labels[slice(*first.queries)]
        # pixels of the labels of the queries
        self.left = round(max(width(text, size) for text in used) + width("00000", size)) + 18
        room = (WIDE - 2 * MARGIN - self.left - 140) // self.across - GAP
        largest = 64 if self.count == 1 else 44
        self.cell = cell = max(1, min(largest, room // columns, LARGEST // rows))
        self.wide, self.high = columns * cell, rows * cell
        self.queries = _labelled(labels, first.queries, first.pool, rows, cell, size)
        self.keys = _labelled(labels, first.keys, first.pool, columns, cell, size)
        # … and of the keys
        self.foot = round(max(width(text, size) for _, text in self.keys)) + 18

    def corner(self, place: int) -> tuple[int, int]:
        """The upper left corner of a matrix's cells."""
        row, column = divmod(place, self.across)
        name = NAME if self.count > 1 else 0
        x = MARGIN + self.left + column * (self.wide + GAP)
        return x, HEAD + name + row * (self.high + name + GAP)

    def draw(self, sheet: Sheet, place: int, matrix: Matrix, scale: Scale) -> None:
        """The matrix, which head it is where there are several, and labels at the edges."""
        x, y = self.corner(place)
        if self.count > 1:
            words = f"layer {matrix.layer}  head {matrix.head}"
            sheet.text((x, y - 14), words, SMALL, INK, "ls")
            after = x + round(width(words, SMALL)) + 16
            sheet.text((after, y - 14), f"kv {matrix.kv_head}", LEAST, QUIET, "ls")
        fractions = scale.fractions(matrix.values)
        sheet.cells((x, y), fractions, self.cell, diverging=scale.signed)
        sheet.frame((x, y), self.wide, self.high, GRID)
        for row, words in self.queries if place % self.across == 0 else ():
            middle = y + row * self.cell + self.cell // 2
            sheet.draw.line(((x - 9, middle), (x - 3, middle)), GRID, 2)
            sheet.text((x - 14, middle), words, self.size, INK, "rm")
        for column, words in self.keys if place + self.across >= self.count else ():
            middle, bottom = x + column * self.cell + self.cell // 2, y + self.high
            sheet.draw.line(((middle, bottom + 3), (middle, bottom + 9)), GRID, 2)
            sheet.turned((middle, bottom + 14), words, self.size)


def _labelled(
    labels: Sequence[str], span: tuple[int, int], pool: int, cells: int, cell: int, size: int
) -> list[tuple[int, str]]:
    """The cells that get a label: as many as have room, at even steps.

    Where not every token has one, they say which token it is, for words come back in a text.
    """
    step = max(1, math.ceil(size * 1.15 / cell))
    found = [(at, min(span[0] + at * pool, span[1] - 1)) for at in range(0, cells, step)]
    if step * pool == 1:
        return [(at, labels[position]) for at, position in found]
    return [(at, f"{labels[position]} {position}") for at, position in found]


def head_map_png(
    report: AttentionReport, metric: str, title: str, *, kind: Kind = "linear"
) -> bytes:
    """The metric of every head as a PNG file; heads that share keys and values stand together.

    Letters mark the kinds of heads that the report found. A metric without an upper bound has
    the largest value as the end of its scale. Raises KeyError for a metric that it has not.
    """
    about = {known.name: known for known in report.metrics}[metric]
    scale = scale_of(report, about, kind)
    most = max(len(layer.heads) for layer in report.layers)
    cell = max(8, min(76, (WIDE - 2 * MARGIN - AXES - 200) // most, TALL // len(report.layers)))
    left, top = MARGIN + AXES, HEAD + AXES
    right = max(_place(layer.heads, len(layer.heads) - 1, cell) for layer in report.layers)
    down = left, top + len(report.layers) * cell
    found = {name for layer in report.layers for head in layer.heads for name in head.labels}
    legend = [
        f"{label.letter}  {label.name}: {label.metric} at least {label.threshold:g}"
        for label in report.labels if label.name in found
    ]  # fmt: skip
    sheet = Sheet(
        max(NARROW, left + right + cell + 50 + bar_width(scale, SMALL) + MARGIN),
        down[1] + 36 + LINE * len(legend) + FOOT,
    )
    sheet.headings(f"{about.words[:1].upper()}{about.words[1:]}", title)
    _axes(sheet, report, (left, top), cell)
    for row, layer in enumerate(report.layers):
        for column, head in enumerate(layer.heads):
            at = left + _place(layer.heads, column, cell), top + row * cell
            value = head.metrics[metric]
            letters = "".join(one.letter for one in report.labels if one.name in head.labels)
            fraction = float(scale.fractions(np.array(value)))
            _cell(sheet, at, cell, value, fraction, letters)
    bar = min(700, max(160, len(report.layers) * cell))
    sheet.colour_bar((left + right + cell + 50, top), bar, scale, SMALL)
    for line, words in enumerate(legend):
        sheet.text((left, down[1] + 36 + LINE * line), words, SMALL, QUIET)
    sheet.footer(
        f"{about.formula}; {kind} scale; gaps part heads that share keys and values", report.ok
    )
    return sheet.png()


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
    sheet: Sheet, at: tuple[int, int], cell: int, value: float, fraction: float, letters: str
) -> None:
    """A head's colour, its value where a number has room, and the letters of its kinds."""
    if math.isnan(value):
        sheet.draw.rectangle((at, (at[0] + cell - 2, at[1] + cell - 2)), MASKED, GRID)
        sheet.draw.line((at[0], at[1] + cell - 2, at[0] + cell - 2, at[1]), HATCH, 2)
        return
    roomy, x, y = cell >= 56, at[0] + cell // 2, at[1] + cell // 2
    sheet.box(at, (cell - 1, cell - 1), fraction, letters[:1] if cell >= 24 and not roomy else "")
    if not roomy:
        return
    fill = (255, 255, 255) if dark(rgb(np.array(fraction))) else INK
    words = f"{value:.2f}".lstrip("0") if 0 <= value < 0.995 else tick(value)
    if value >= 0.995:
        words = f"{value:.1f}" if value < math.inf else "inf"
    if width(words, LEAST) < cell - 6:
        sheet.text((x, y + (11 if letters else 0)), words, LEAST, fill, "mm")
    sheet.text((x, y - 13), letters, SMALL, fill, "mm")
