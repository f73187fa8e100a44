"""The matrices of chosen heads as a PNG for a paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.render.palette import Kind, Scale
from llmcli.render.png import (
    FOOT,
    GRID,
    HEAD,
    INK,
    LEAST,
    MARGIN,
    NARROW,
    QUIET,
    SMALL,
    WIDE,
    Sheet,
    bar_width,
    fitted,
    label,
    width,
)
from llmcli.reports.attention import AttentionReport, Matrix

GAP = 56  # between two matrices
LONGEST = 300  # pixels of a token's label


def attention_png(report: AttentionReport, title: str, *, kind: Kind = "linear") -> bytes:
    """The report's matrices side by side, on one scale, as a PNG file.

    A pattern's scale is always 0 to 1, so that heads can be compared; scores have the largest of
    all in the picture. `title` names the model. Raises ValueError where there is no matrix.
    """
    if not report.matrices:
        raise ValueError("no matrix to draw")
    scores = report.what == "scores"
    scale = (
        Scale.around([matrix.values for matrix in report.matrices], kind)
        if scores
        else Scale(low=0.0, high=1.0, kind=kind)
    )
    panel = _panel(report)
    across = min(len(report.matrices), max(1, (WIDE - 2 * MARGIN) // (panel.width + GAP) or 1))
    down = math.ceil(len(report.matrices) / across)
    inner = across * (panel.width + GAP)
    sheet = Sheet(
        max(NARROW, 2 * MARGIN + inner + bar_width(scale, SMALL)),
        HEAD + down * (panel.height + GAP) - GAP + FOOT,
    )
    heads = [f"layer {m.layer} head {m.head}" for m in report.matrices]
    what = "Attention scores" if scores else "Attention"
    one = f"{what}, {heads[0]}" if len(heads) == 1 else f"{what} of {len(heads)} heads"
    sheet.headings(one, title)
    for place, matrix in enumerate(report.matrices):
        row, column = divmod(place, across)
        at = MARGIN + column * (panel.width + GAP), HEAD + row * (panel.height + GAP)
        panel.draw(sheet, at, matrix, scale, named=len(heads) > 1)
    top = HEAD + panel.head
    sheet.colour_bar((MARGIN + inner, top), min(panel.rows * panel.cell, 900), scale, SMALL)
    sheet.footer(_caption(report, kind), report.ok)
    return sheet.png()


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """Where one matrix has its cells and labels; all of a picture are alike."""

    rows: int
    columns: int
    cell: int
    left: int  # pixels of the labels of the queries
    head: int  # pixels above the cells: the head's name
    foot: int  # pixels of the labels of the keys
    size: int
    queries: Sequence[tuple[int, str]]  # (row, label)
    keys: Sequence[tuple[int, str]]

    @property
    def width(self) -> int:
        return self.left + self.columns * self.cell

    @property
    def height(self) -> int:
        return self.head + self.rows * self.cell + self.foot

    def draw(
        self, sheet: Sheet, at: tuple[int, int], matrix: Matrix, scale: Scale, *, named: bool
    ) -> None:
        """The matrix with its labels; `named`: which head it is above it."""
        x, y = at[0] + self.left, at[1] + self.head
        if named:
            words = f"layer {matrix.layer}  head {matrix.head}"
            sheet.text((x, y - 14), words, SMALL, INK, "ls")
            after = x + round(width(words, SMALL)) + 16
            sheet.text((after, y - 14), f"kv {matrix.kv_head}", LEAST, QUIET, "ls")
        fractions = scale.fractions(matrix.values)
        sheet.cells((x, y), fractions, self.cell, diverging=scale.signed)
        sheet.frame((x, y), self.columns * self.cell, self.rows * self.cell, GRID)
        for row, words in self.queries:
            middle = y + row * self.cell + self.cell // 2
            sheet.draw.line(((x - 9, middle), (x - 3, middle)), GRID, 2)
            sheet.text((x - 14, middle), words, self.size, INK, "rm")
        bottom = y + self.rows * self.cell
        for column, words in self.keys:
            middle = x + column * self.cell + self.cell // 2
            sheet.draw.line(((middle, bottom + 3), (middle, bottom + 9)), GRID, 2)
            sheet.turned((middle, bottom + 14), words, self.size)


def _panel(report: AttentionReport) -> _Panel:
    """The largest cells with which all matrices fit a page's width, and the labels they leave."""
    first = report.matrices[0]
    rows, columns = first.values.shape
    across = {1: 1, 2: 2, 3: 3, 4: 2}.get(
        len(report.matrices), 3 if len(report.matrices) < 10 else 4
    )
    room = (WIDE - 2 * MARGIN - 120) // across - GAP
    named = len(report.matrices) > 1
    size = SMALL if across == 1 else LEAST
    longest = LONGEST if across == 1 else LONGEST // 2
    labels = [fitted(label(*token), size, longest) for token in report.tokens]
    used = labels[slice(*first.keys)] + labels[slice(*first.queries)]
    left = round(max(width(text, size) for text in used) + width("00000", size)) + 18
    most = 64 if across == 1 else 44
    cell = max(1, min(most, (room - left) // columns, 1560 // rows))
    queries = _labelled(labels, first.queries, first.pool, rows, cell, size)
    keys = _labelled(labels, first.keys, first.pool, columns, cell, size)
    return _Panel(
        rows=rows,
        columns=columns,
        cell=cell,
        left=left,
        head=SMALL + 18 if named else 0,
        foot=round(max(width(text, size) for _, text in keys)) + 18,
        size=size,
        queries=queries,
        keys=keys,
    )


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


def _caption(report: AttentionReport, kind: Kind) -> str:
    first = report.matrices[0]
    words = ["queries down, keys across", f"{kind} scale"]
    if first.pool > 1:
        words.append(f"1 cell is the largest of {first.pool} x {first.pool}")
    words.append(f"computed in {report.dtype}")
    return "; ".join(words)
