"""Matrices of attention as heatmaps: one with its tokens, several beside each other.

A row is a query, a column a key. A cell that stands for several is the largest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from llmcli.reports.matrix import Matrix
from llmcli.ui.cells import Ink, Line, fitted, padded, painted
from llmcli.ui.layout import WIDEST, Dotted
from llmcli.ui.palette import Scale
from llmcli.ui.theme import FAINT, HEADING, quoted

TALLEST = 64  # rows that are drawn as large cells, a line each
GUTTER, LABEL = 14, 24  # least and most columns of the tokens on the left
LEAST = 6  # columns with which a token can still be told
PANEL, GAP = 24, 2  # least columns of one of several heatmaps, and those between two
KEYS = 48  # so many keys are spelled out below, where the rows do not name them


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """One head's matrix with `tokens` (the text of every position) on the left, keys below.

    The first `given` tokens (None: all) are the prompt; a + marks those that the model wrote.
    """

    matrix: Matrix
    tokens: Sequence[str]
    scale: Scale
    given: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ink = Ink.of(console, options, diverging=self.scale.signed)
        width = min(options.max_width, WIDEST)
        shown = pooled(self.matrix, max(8, width - GUTTER))
        rows, columns = shown.values.shape
        wide = rows <= TALLEST and 2 * columns + GUTTER <= width
        cell, each = 2 if wide else 1, 2 if ink.halves and not wide else 1
        gutter = min(self._needed(each), max(GUTTER, width - columns * cell))
        lines = painted(self.scale.fractions(shown.values), ink, wide=wide)
        for at, line in enumerate(lines):
            here = [self._position(shown, at * each + below, rows) for below in range(each)]
            yield Segment(self._label(here, gutter - 1, ink) + " ")
            yield from line
            yield Segment.line()
        below = ticks(shown.keys[0], shown.pool, columns, cell)
        yield Segment(f"{'key':>{gutter - 1}} {below}".rstrip(), Style.parse(FAINT))
        yield Segment.line()
        if border := written(shown, self.given, cell, width - gutter):
            yield Segment(f"{'':{gutter}}{border}", Style.parse(FAINT))
            yield Segment.line()
        notes = [*about(shown, self.given), spread(shown.values)]
        yield from console.render(Dotted(notes, FAINT), options)
        yield from self._keys(console, options, shown)

    def _needed(self, each: int) -> int:
        """Columns of the longest label, but no more than is good."""
        digits = len(str(len(self.tokens) - 1))
        return max(GUTTER, digits + 1 + each * (1 + min(self._longest, LABEL - digits - 2)))

    def _position(self, shown: Matrix, row: int, rows: int) -> int | None:
        return shown.queries[0] + row * shown.pool if row < rows else None

    def _label(self, positions: Sequence[int | None], width: int, ink: Ink) -> str:
        """The position of the first query of a line, and the tokens of all that have room."""
        first = positions[0]
        assert first is not None
        digits = len(str(len(self.tokens) - 1))
        number, room = f"{first:>{digits}} ", width - digits - 1
        known = [at for at in positions if at is not None]
        each = (room + 1) // len(known)  # with the gap after it
        if each <= min(self._longest, LEAST):  # only the upper one's is readable
            known, each = known[:1], room + 1
        widths = [each - 1] * (len(known) - 1) + [room - each * (len(known) - 1)]
        texts = [fitted(self._text(at), w, ink) for at, w in zip(known, widths, strict=True)]
        return number + " ".join(texts)

    @cached_property
    def _longest(self) -> int:
        return max(cell_len(self._text(at)) for at in range(len(self.tokens)))

    def _text(self, at: int) -> str:
        mark = "+" if self.given is not None and at >= self.given else ""
        return mark + (quoted(self.tokens[at]) if self.tokens[at] else "")

    def _keys(self, console: Console, options: ConsoleOptions, shown: Matrix) -> RenderResult:
        """The keys by name where the rows do not name them."""
        first, last = shown.keys
        named = shown.queries[0] <= first and last <= shown.queries[1]
        if named or last - first > KEYS or not any(self.tokens[first:last]):
            return
        names = [f"{at} {self._text(at)}" for at in range(first, last)]
        yield from console.render(Dotted(["keys", *names], FAINT), options)


@dataclass(frozen=True, kw_only=True)
class Panels:
    """Several heads beside and below each other, all on one scale, `titles` above them.

    On the left the positions of their queries, with a + from `given` on (None: nowhere).
    """

    matrices: Sequence[Matrix]
    titles: Sequence[str]
    scale: Scale
    given: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ink = Ink.of(console, options, diverging=self.scale.signed)
        gutter = len(str(self.matrices[0].queries[1] - 1)) + 2
        width = min(options.max_width, WIDEST) - gutter
        beside = self._beside(width)
        room = (width + GAP) // beside - GAP
        for first in range(0, len(self.matrices), beside):
            if first:
                yield Segment.line()
            some = range(first, min(first + beside, len(self.matrices)))
            panels = [self._panel(at, room, ink) for at in some]
            sides = self._sides(room, gutter, ink)
            for side, *lines in zip(sides, *panels, strict=True):
                yield Segment(side, Style.parse(FAINT))
                for number, line in enumerate(lines):
                    yield from padded(line, room + GAP) if number < len(lines) - 1 else line
                yield Segment.line()
        shown = pooled(self.matrices[0], room)
        values = np.concatenate([matrix.values.ravel() for matrix in self.matrices])
        notes = [*about(shown, self.given), spread(values)]
        yield from console.render(Dotted(notes, FAINT), options)

    def _beside(self, width: int) -> int:
        """How many stand beside each other: whole where two of them fit, else as small as goes."""
        columns = self.matrices[0].values.shape[1]
        whole = (width + GAP) // (max(columns, PANEL // 2) + GAP)
        most = whole if whole > 1 else (width + GAP) // (PANEL + GAP)
        return max(1, min(len(self.matrices), most))

    def _sides(self, room: int, gutter: int, ink: Ink) -> list[str]:
        """The first query of every line of a panel, beside which these stand."""
        shown = pooled(self.matrices[0], room)
        rows, columns = shown.values.shape
        step = 2 if ink.halves and 2 * columns > room else 1
        sides = []
        for at in range(shown.queries[0], shown.queries[0] + rows * shown.pool, step * shown.pool):
            mark = "+" if self.given is not None and at >= self.given else " "
            sides.append(f"{at:>{gutter - 2}}{mark} ")
        return [" " * gutter, *sides, " " * gutter]

    def _panel(self, at: int, room: int, ink: Ink) -> list[Line]:
        shown = pooled(self.matrices[at], room)
        columns = shown.values.shape[1]
        wide = 2 * columns <= room
        heading = Segment(fitted(self.titles[at], room, ink), Style.parse(HEADING))
        below = ticks(shown.keys[0], shown.pool, columns, 2 if wide else 1)
        lines = painted(self.scale.fractions(shown.values), ink, wide=wide)
        return [[heading], *lines, [Segment(below, Style.parse(FAINT))]]


@dataclass(frozen=True)
class ColourBar:
    """What the colours, or shades, mean: the scale's ends and its middle, and the masked cell.

    `words` say what is shown; `masked` is what the dot stands for, empty where there is none.
    """

    words: str
    scale: Scale
    masked: str = "masked"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ink = Ink.of(console, options, diverging=self.scale.signed)
        middle = number(self.scale.value(0.5))
        ends = [number(self.scale.low), number(self.scale.high)]
        if self.scale.kind == "log" and not self.scale.signed:  # what is less looks like nothing
            ends[0] = f"<{number(self.scale.value(1e-9))}"
        kind = "" if self.scale.kind == "linear" else f" ({self.scale.kind} scale)"
        dot = f"   {ink.dot} {self.masked}" if self.masked else ""
        used = len("".join([*ends, middle])) + 4 + len(dot)
        half = max(4, min(16, (options.max_width - used) // 2))
        yield Text(f"{self.words}{kind}")
        places = np.linspace(0, 1, half)[None]
        left, right = Segment.divide(painted(places, ink, wide=True)[0], [half, 2 * half])
        yield Segment(f"{ends[0]} ")
        yield from left
        yield Segment(f" {middle} ")
        yield from right
        yield Segment(f" {ends[1]}{dot}")
        yield Segment.line()


def pooled(matrix: Matrix, most: int) -> Matrix:
    """The matrix in at most `most` columns: a cell is the largest of a square that is not masked.

    Where weights have signs it is the one that is furthest from 0. The squares of one row may end
    early at its end; as the matrix's own did.
    """
    rows, columns = matrix.values.shape
    side = -(-columns // most)
    if side <= 1:
        return matrix
    grown = np.full((-(-rows // side) * side, -(-columns // side) * side), np.nan)
    grown[:rows, :columns] = matrix.values
    squares = grown.reshape(len(grown) // side, side, -1, side)
    values = np.where(np.isnan(squares), -np.inf, squares).max(axis=(1, 3))
    values[np.isneginf(values)] = np.nan
    if matrix.signed:
        least = np.where(np.isnan(squares), np.inf, squares).min(axis=(1, 3))
        values = np.where(-least > values, least, values)
    return Matrix(
        layer=matrix.layer,
        head=matrix.head,
        kv_head=matrix.kv_head,
        queries=matrix.queries,
        keys=matrix.keys,
        pool=matrix.pool * side,
        values=values.astype(np.float32),
        signed=matrix.signed,
    )


def about(shown: Matrix, given: int | None) -> Iterator[str]:
    """Which part it is, what a + marks (see `Heatmap`), and how much a cell stands for."""
    yield f"queries {span(shown.queries)} down, keys {span(shown.keys)} across"
    if given is not None and shown.queries[1] > given:
        yield f"+ written by the model, from {given} on"
    if shown.pool > 1:
        largest = "largest of either sign" if shown.signed else "largest"
        yield f"1 cell = the {largest} of {shown.pool} × {shown.pool}"
        yield "a part at a time: --query and --key"


def written(shown: Matrix, given: int | None, cell: int, room: int) -> str:
    """What marks, below the keys, the first one that the model wrote, in `room` columns or less.

    Empty where all or none were.
    """
    if given is None or not shown.keys[0] < given < shown.keys[1]:
        return ""
    at = (given - shown.keys[0]) // shown.pool * cell
    words = f"from {given} on written by the model"
    if at > len(words):
        return f"{words:>{at - 1}} ^"
    return f"{'':{at}}^ {words if at + 2 + len(words) <= room else ''}".rstrip()


def span(positions: tuple[int, int]) -> str:
    """`40:80` for positions 40 … 79, as `--query` takes them, `7` for a single one."""
    first, last = positions
    return str(first) if last - first == 1 else f"{first}:{last}"


def spread(values: np.ndarray) -> str:
    """`values 0.00012 … 0.98`, of what is not masked."""
    seen = values[~np.isnan(values)]
    if not seen.size:
        return "all masked"
    return f"values {number(float(seen.min()))} … {number(float(seen.max()))}"


def number(value: float) -> str:
    """Three digits, with a minus sign."""
    return f"{value + 0.0:.3g}".replace("-", "−")


def ticks(first: int, pool: int, columns: int, cell: int) -> str:
    """Positions of keys under their cells, as many as have room."""
    widest = len(str(first + (columns - 1) * pool))
    steps = (base * 10**power for power in range(8) for base in (1, 2, 5))
    step = next(step for step in steps if step * cell > widest)
    line = ""
    for at in range(0, columns, step):
        longer = f"{line:<{at * cell}}{first + at * pool}"
        line = longer if not at or len(longer) <= columns * cell else line
    return line
