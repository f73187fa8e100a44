"""Attention as a page to explore heads on, and as a PNG for a paper.

The page collects the matrices of one layer after the other, and is written when all is known. A
picture has the matrices of chosen heads, or one number of every head.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.commands.attention.report import AttentionReport, HeadReport, LayerReport
from llmcli.commands.attention.view.heads import group_starts, scale_of
from llmcli.commands.attention.view.screen import layer_notes, matrix_scale
from llmcli.records.attention import Label, Matrix, What
from llmcli.ui import png
from llmcli.ui.numbers import tick
from llmcli.ui.page import checks, finite, page, token
from llmcli.ui.palette import Kind, Scale

FRAME = 40 << 10  # bytes of a page without its heads
GAP = 30  # pixels between two matrices
NAME = 46  # … above a matrix: which head it is
LONGEST = 300  # … of a token's label
LARGEST = 1560  # … of a matrix from above to below
AXES = 90  # … left of the boxes of heads and above them
LINE = 40  # … of the legend
TALL = 2600  # … of all boxes: a page of a paper
PRECISION = {
    "pattern": "Weights w are kept here in 256 steps of √w: what is shown is off by at most "
    "√w/255, 0.004 where w is 1 and 0.0004 where it is 0.01. Numbers of heads are exact. "
    "For exact weights write a .safetensors or .npz file.",
    "signed": "Weights w with signs are kept in 255 steps of √|w|, up to the head's largest; their "
    "colours go from 0 both ways, as far as the largest of all. ",
    "scores": "Scores are kept here in 256 steps between a head's smallest and largest. Numbers "
    "of heads are exact. For exact scores write a .safetensors or .npz file.",
}


class AttentionPage:
    """Every head's matrix, a byte a cell."""

    def __init__(self, what: What) -> None:
        self._what: What = what
        # by layer: its window, how its numbers are kept, and its heads
        self._layers: dict[int, tuple[dict[str, Any], str, list[dict[str, Any]]]] = {}

    def add(
        self, layer: int, values: np.ndarray, seen: np.ndarray, window: dict[str, Any], *,
        signed: bool = False,
    ) -> None:  # fmt: skip
        """Adds all chosen heads of a layer, `[H, T, T]`, the cells that are `seen` `[T, T]`.

        `window`: its facts for the script. `signed`: weights with signs.
        """
        kind = "scores" if self._what == "scores" else "signed" if signed else "plain"
        self._layers[layer] = window, kind, [_packed(kind, matrix[seen]) for matrix in values]

    def html(self, report: AttentionReport, title: str, *, kind: Kind = "linear") -> bytes:
        """The page of the report whose matrices were added. `title` names the model.

        `kind`: the scale it begins with.
        """
        kept = [self._layers[layer.layer] for layer in report.layers]
        wide = [head for _, values, heads in kept if values != "plain" for head in heads]
        ends = [abs(head[end]) for head in wide for end in ("low", "high")]
        what = "Attention scores" if self._what == "scores" else "Attention"
        data = {
            "heading": what,
            "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
            "what": self._what,
            "most": max(ends, default=1.0) or 1.0,
            "bend": kind,
            "precision": PRECISION["signed"] * report.signed + PRECISION[self._what],
            "tokens": [token(one) for one in report.tokens],
            "prompt_tokens": report.prompt_tokens,
            "metrics": [vars(metric) for metric in report.metrics],
            "labels": [vars(label) for label in report.labels],
            "layers": [self._layer(layer) for layer in report.layers],
            "checks": checks(report.checks),
        }
        blocks = [
            (f"cells-{row}-{column}", head["cells"])
            for row, (_, _, heads) in enumerate(kept)
            for column, head in enumerate(heads)
        ]
        return page("attention", f"{what}: {title}", data, blocks)

    def _layer(self, layer: LayerReport) -> dict[str, Any]:
        window, values, kept = self._layers[layer.layer]
        heads = [
            {
                **vars(head),
                "metrics": {name: finite(value) for name, value in head.metrics.items()},
                "low": matrix["low"],
                "high": matrix["high"],
            }
            for head, matrix in zip(layer.heads, kept, strict=True)
        ]
        about = {"layer": layer.layer, "kind": layer.kind, "kv_heads": layer.kv_heads}
        return {**about, **window, "values": values, "note": layer.note, "heads": heads}


def page_size(tokens: int, cells: Sequence[int], heads: int, metrics: int) -> int:
    """Bytes of the page, to within a tenth.

    `cells` of a head that are not masked, by layer; `heads` of every layer are in it; `metrics`:
    numbers of each head.
    """
    each = 150 + 36 * metrics
    return FRAME + tokens * 26 + len(cells) * heads * each + -(-sum(cells) * heads * 4 // 3)


def _packed(kind: str, values: np.ndarray) -> dict[str, Any]:
    """The visible cells of one head in steps, with what the first and the last step mean.

    Weights in 256 steps of their roots, scores in 256 even steps from the smallest to the largest,
    signed weights in 255 steps of their roots: step 127 is 0.
    """
    low, high = 0.0, 1.0
    if kind == "scores":
        low, high = float(values.min()), float(values.max())
        steps = (values - low) / ((high - low) or 1.0) * 255
    elif kind == "signed":
        high = float(np.abs(values).max())
        low = -high
        steps = 127 + np.sign(values) * np.sqrt(np.abs(values) / (high or 1.0)) * 127
    else:
        steps = np.sqrt(values.clip(0, 1)) * 255
    cells = base64.b64encode(steps.round().astype(np.uint8).tobytes()).decode()
    return {"low": low, "high": high, "cells": cells}


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
    sheet = png.Sheet(
        max(png.NARROW, right + png.bar_width(scale, png.SMALL) + png.MARGIN),
        figure.corner(figure.count - 1)[1] + figure.high + figure.foot + png.FOOT,
    )
    first, which = report.matrices[0], " of chosen heads"
    if figure.count == 1:
        which = f", layer {first.layer} head {first.head}"
    scores = " scores" * (report.what == "scores")
    sheet.headings(f"Attention{scores}{which}", title)
    for place, matrix in enumerate(report.matrices):
        figure.draw(sheet, place, matrix, scale)
    sheet.colour_bar((right, figure.corner(0)[1]), min(figure.high, 900), scale, png.SMALL)
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
        self.size = size = png.SMALL if self.count == 1 else png.LEAST
        longest = LONGEST if self.count == 1 else 2 * LONGEST // 3
        labels = [png.fitted(png.label(token), size, longest) for token in report.tokens]
        used = labels[slice(*first.keys)] + labels[slice(*first.queries)]
        # pixels of the labels of the queries
        longest_used = max(png.width(text, size) for text in used)
        self.left = round(longest_used + png.width("00000", size)) + 18
        room = (png.WIDE - 2 * png.MARGIN - self.left - 140) // self.across - GAP
        largest = 64 if self.count == 1 else 44
        self.cell = cell = max(1, min(largest, room // columns, LARGEST // rows))
        self.wide, self.high = columns * cell, rows * cell
        self.queries = _labelled(labels, first.queries, first.pool, rows, cell, size)
        self.keys = _labelled(labels, first.keys, first.pool, columns, cell, size)
        # … and of the keys
        self.foot = round(max(png.width(text, size) for _, text in self.keys)) + 18

    def corner(self, place: int) -> tuple[int, int]:
        """The upper left corner of a matrix's cells."""
        row, column = divmod(place, self.across)
        name = NAME if self.count > 1 else 0
        x = png.MARGIN + self.left + column * (self.wide + GAP)
        return x, png.HEAD + name + row * (self.high + name + GAP)

    def draw(self, sheet: png.Sheet, place: int, matrix: Matrix, scale: Scale) -> None:
        """The matrix, which head it is where there are several, and labels at the edges."""
        x, y = self.corner(place)
        if self.count > 1:
            words = f"layer {matrix.layer}  head {matrix.head}"
            sheet.text((x, y - 14), words, png.SMALL, png.INK, "ls")
            after = x + round(png.width(words, png.SMALL)) + 16
            sheet.text((after, y - 14), f"kv {matrix.kv_head}", png.LEAST, png.QUIET, "ls")
        fractions = scale.fractions(matrix.values)
        sheet.cells((x, y), fractions, self.cell, diverging=scale.signed)
        sheet.frame((x, y), self.wide, self.high, png.GRID)
        for row, words in self.queries if place % self.across == 0 else ():
            middle = y + row * self.cell + self.cell // 2
            sheet.draw.line(((x - 9, middle), (x - 3, middle)), png.GRID, 2)
            sheet.text((x - 14, middle), words, self.size, png.INK, "rm")
        for column, words in self.keys if place + self.across >= self.count else ():
            middle, bottom = x + column * self.cell + self.cell // 2, y + self.high
            sheet.draw.line(((middle, bottom + 3), (middle, bottom + 9)), png.GRID, 2)
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
    longest = max((layer.heads for layer in report.layers), key=len)
    numbers, count = [head.head for head in longest], len(report.layers)
    starts = group_starts(report)
    side = (png.WIDE - 2 * png.MARGIN - AXES - 200) // len(numbers)
    side = max(8, min(76, side, TALL // count))

    def cell(row: int, column: int) -> list[tuple[float, str]]:
        heads = report.layers[row].heads
        if column >= len(heads):
            return []
        value = heads[column].metrics[metric]
        words = _in_box(heads[column], value, report.labels, side)
        return [(float(scale.fractions(np.array(value))), words)]

    grid = png.BoxGrid(
        left=png.MARGIN + AXES,
        top=png.HEAD + AXES,
        across=side,
        down=side,
        gap=1,
        parted=[at for at, head in enumerate(numbers) if head in starts],
        names=[str(layer.layer) for layer in report.layers],
        columns=len(numbers),
        cell=cell,
    )
    found = {name for head in report.heads.values() for name in head.labels}
    legend = [
        f"{label.letter}  {label.name}: {label.metric} at least {label.threshold:g}"
        for label in report.labels
        if label.name in found
    ]
    right, below = grid.right + 50, grid.bottom + 36
    sheet = png.Sheet(
        max(png.NARROW, right + png.bar_width(scale, png.SMALL) + png.MARGIN),
        below + LINE * len(legend) + png.FOOT,
    )
    sheet.headings(about.name, f"{title} · {about.words}")
    sheet.turned((png.MARGIN + 12, grid.top), "layer", png.LEAST, png.QUIET)
    sheet.text((grid.left, grid.top - AXES + 34), "head", png.LEAST, png.QUIET, "ls")
    grid.draw(sheet)
    grid.numbers(sheet, numbers, png.LEAST)
    bar = min(700, max(160, count * side))
    sheet.colour_bar((right, grid.top), bar, scale, png.SMALL)
    for line, words in enumerate(legend):
        sheet.text((grid.left, below + LINE * line), words, png.SMALL, png.QUIET)
    sheet.footer(
        f"{about.formula}; {kind} scale; gaps part heads that share keys and values", report.ok
    )
    return sheet.png()


def _in_box(head: HeadReport, value: float, labels: Sequence[Label], side: int) -> str:
    """The letters of a head's kinds above its value: both, one or none, as the box has room."""
    letters = "".join(one.letter for one in labels if one.name in head.labels)
    if math.isnan(value) or side < 24:
        return ""
    if side < 56:
        return letters[:1]
    words = f"{value:.2f}".lstrip("0") if 0 <= value < 0.995 else tick(value)
    if value >= 0.995:
        words = f"{value:.1f}" if value < math.inf else "inf"
    fits = png.width(words, png.LEAST) < side - 6
    return "\n".join(filter(None, [letters, words * fits]))
