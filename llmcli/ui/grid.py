"""Grids of cells with their names around them: heatmaps, maps of heads, the lens, experts.

On a terminal `Grid` puts cells of any kind beside their names; `BoxGrid` of `png` draws boxes.
A matrix of attention has a row for each query, a column for each key; a cell that stands for
several is the largest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from llmcli.records.attention import Matrix
from llmcli.records.text import Token
from llmcli.ui.layout import WIDEST, Line, cut, fitted, in_words
from llmcli.ui.numbers import brief, number, span
from llmcli.ui.palette import Ink, Scale, Segments, painted
from llmcli.ui.theme import FAINT, HEADING, SPACE, quoted

TALLEST = 64  # rows that are drawn as large cells, a line each
GUTTER, LABEL = 14, 24  # fewest and most columns of the tokens on the left
SHORTEST = 6  # columns with which a token can still be told apart
NAMED = 4  # columns of a cell that has its token below it
LEAST_NUMBER = 0.1  # where nothing is larger, two decimals say too little
WIDE = 12  # columns of a cell at most
PANEL, GAP = 24, 2  # fewest columns of one of several heatmaps, and those between two
SHORT = 6  # columns of half a colour bar beside its words
KEYS = 48  # so many keys are spelled out below, where the rows do not name them


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Lines of cells: a name in `gutter` columns, then each cell behind what `before` it has.

    `before` is the gap of every column that is shown, or a bar (see `gaps`).
    """

    ink: Ink
    gutter: int
    before: Sequence[str]

    def line(self, name: str, cells: Sequence[Segments], style: str = FAINT) -> Iterator[Segment]:
        """A line of cells, each as wide as its column; spaces at its end are left out."""
        *segments, last = self.part(name, cells, style)
        yield from segments
        coloured = last.style is not None and last.style.bgcolor is not None
        yield last if coloured else Segment(last.text.rstrip(), last.style)
        yield Segment.line()

    def part(self, name: str, cells: Sequence[Segments], style: str = FAINT) -> Iterator[Segment]:
        """The cells of a line that goes on."""
        yield Segment(name + " " * (self.gutter - cell_len(name)), Style.parse(style))
        for before, cell in zip(self.before, cells, strict=True):
            if before:
                yield Segment(before, Style.parse(FAINT))
            yield from cell

    def words(
        self, name: str, words: Sequence[str], widths: Sequence[int], style: str = FAINT
    ) -> Iterator[Segment]:
        """A line of words, one for each column."""
        texts = map(fitted, words, widths, repeat(self.ink))
        return self.line(name, [[Segment(text, Style.parse(style))] for text in texts])

    def rule(self, name: str, widths: Sequence[int]) -> Iterator[Segment]:
        """A line as long as the others, with the name of the rows below it."""
        line = f"{name} ".ljust(self.gutter, "─") if name else "─" * self.gutter
        for before, width in zip(self.before, widths, strict=True):
            cross = "─" if before.isspace() else "┼"
            line += cross + "─" * (len(before) - 1 + width)
        yield Segment(line, Style.parse(FAINT))
        yield Segment.line()


@dataclass(frozen=True)
class Fit:
    """A view that depends on the console: `draw(columns, ink)` gives its parts."""

    draw: Callable[[int, Ink], Iterable[RenderableType | Segment]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.draw(options.max_width, Ink.of(console, options))


def gaps(columns: range, gap: int, written: int, ink: Ink) -> list[str]:
    """The gaps before these columns, with a bar before the first one that the model wrote."""
    return [f"{bar(ink) if at == written else '':<{gap}}" for at in columns]


def bar(ink: Ink) -> str:
    """The bar before a column."""
    return "|" if ink.ascii else "│"


def written_note(positions: Sequence[int], prompt_tokens: int, ink: Ink) -> list[str]:
    """What the bar means, where the model wrote some of these ascending positions."""
    if positions[-1] < prompt_tokens:
        return []
    return [f"{bar(ink)} from position {prompt_tokens} on the model wrote it"]


def position_words(tokens: Sequence[Token], at: int, prompt_tokens: int, *, after: str = "") -> str:
    """`position 8 of 12: ␣cat, which the model wrote`; `after` stands before the token."""
    by = "" if at < prompt_tokens else ", which the model wrote"
    return f"position {at} of {len(tokens)}: {after}{in_words(tokens[at])}{by}"


def last_columns(widths: Sequence[int], room: int, gap: int) -> range:
    """As many of the last columns as fit `room`, each behind a gap; at least one."""
    first, used = len(widths), 0
    while first and used + gap + widths[first - 1] <= room:
        first -= 1
        used += gap + widths[first]
    return range(min(first, len(widths) - 1), len(widths))


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """One head's matrix with `tokens` (the text of every position) on the left and below.

    Cells are as wide as there is room, with their numbers in them where these fit. The first
    `given` tokens (None: all) are the prompt; a + marks the model's own.
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
        each = 2 if ink.halves and not wide else 1
        gutter = min(self._needed(each), max(GUTTER, width - columns * (2 if wide else 1)))
        names = [self._column(at) for at in range(*shown.keys)] if shown.pool == 1 else []
        longest = max((cell_len(name) for name in names), default=0)
        cells = Cells.of([shown], ink, width - gutter, longest)
        grid = Grid(ink=ink, gutter=gutter, before=[""])
        for at, line in enumerate(cells.painted(shown, self.scale)):
            here = range(at * each, min(rows, (at + 1) * each))
            queries = [shown.queries[0] + row * _rows_of_a_cell(shown) for row in here]
            yield from grid.line(self._label(queries, gutter - 1, ink), [line], "")
        named = bool(names) and cells.width >= NAMED
        below = [(f"{'key':>{gutter - 1}}", cells.ticks(shown))]
        below += [("", "".join(_under(name, cells.width, ink) for name in names))] * named
        border = written(shown, self.given, cells.width, width - gutter)
        for name, text in below + [("", border)] * bool(border):
            yield from grid.line(name, [[Segment(text, Style.parse(FAINT))]])
        whole = (0, len(self.tokens))
        notes = list(about(shown, self.given))
        if not cells.numbers:
            notes.append(spread(shown.values))
        if not cells.numbers or len(notes) > 1 or (shown.queries, shown.keys) != (whole, whole):
            yield from console.render(Line(notes, FAINT), options)
        if not named or longest >= cells.width:
            yield from self._keys(console, options, shown)

    def _column(self, at: int) -> str:
        """A token below its column: its row has it in quotes."""
        text = quoted(self.tokens[at])[1:-1] if self.tokens[at] else ""
        return text.strip() or SPACE * len(text)

    def _needed(self, each: int) -> int:
        """Columns of the longest label, but no more than is good."""
        digits = len(str(len(self.tokens) - 1))
        return max(GUTTER, digits + 1 + each * (1 + min(self._longest, LABEL - digits - 2)))

    def _label(self, known: Sequence[int], width: int, ink: Ink) -> str:
        """The position of the first query of a line, and the tokens of all that have room."""
        digits = len(str(len(self.tokens) - 1))
        number, room = f"{known[0]:>{digits}} ", width - digits - 1
        each = (room + 1) // len(known)  # with the gap after it
        if each <= min(self._longest, SHORTEST):  # only the upper one's is readable
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
        yield from console.render(Line(["keys", *names], FAINT), options)


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
        room = max(8, (width + GAP) // beside - GAP)
        parts = [pooled(matrix, room) for matrix in self.matrices]
        cells = Cells.of(parts, ink, room)
        for first in range(0, len(self.matrices), beside):
            if first:
                yield Segment.line()
            some = range(first, min(first + beside, len(self.matrices)))
            panels = [
                [
                    [Segment(fitted(self.titles[at], room, ink), Style.parse(HEADING))],
                    *cells.painted(parts[at], self.scale),
                    [Segment(cells.ticks(parts[at]), Style.parse(FAINT))],
                ]
                for at in some
            ]
            grid = Grid(ink=ink, gutter=gutter, before=["", *[" " * GAP] * (len(some) - 1)])
            sides = self._sides(parts[0], gutter, cells)
            for side, *lines in zip(sides, *panels, strict=True):
                padded = [Segment.adjust_line_length(line, room) for line in lines]
                yield from grid.line(side, padded)
        values = np.concatenate([matrix.values.ravel() for matrix in self.matrices])
        notes = [*about(parts[0], self.given), *([] if cells.numbers else [spread(values)])]
        yield from console.render(Line(notes, FAINT), options)

    def _beside(self, width: int) -> int:
        """How many stand beside each other: whole where two of them fit, else as small as goes."""
        columns = self.matrices[0].values.shape[1]
        whole = (width + GAP) // (max(columns, PANEL // 2) + GAP)
        most = whole if whole > 1 else (width + GAP) // (PANEL + GAP)
        return max(1, min(len(self.matrices), most))

    def _sides(self, shown: Matrix, gutter: int, cells: Cells) -> list[str]:
        """The first query of every line of a panel, beside which these stand."""
        step = 2 if cells.ink.halves and cells.width == 1 else 1
        sides = []
        each = _rows_of_a_cell(shown)
        last = shown.queries[0] + len(shown.values) * each
        for at in range(shown.queries[0], last, step * each):
            mark = "+" if self.given is not None and at >= self.given else " "
            sides.append(f"{at:>{gutter - 2}}{mark}")
        return ["", *sides, ""]


@dataclass(frozen=True)
class Cells:
    """The cells of a heatmap: columns of one, and whether it has its number in it."""

    ink: Ink
    width: int
    numbers: bool

    @classmethod
    def of(cls, matrices: Sequence[Matrix], ink: Ink, room: int, longest: int = 0) -> Cells:
        """As wide as `room` columns let those of all `matrices` be, and as something needs.

        Which are numbers, and names below a cell: the `longest` takes so many columns.
        """
        rows, columns = matrices[0].values.shape
        most = room // max(1, columns) if rows <= TALLEST else 1
        if most < 2:
            return cls(ink, 1, numbers=False)
        values = np.concatenate([matrix.values.ravel() for matrix in matrices])
        digits = max((len(brief(value)) for value in values[~np.isnan(values)]), default=0)
        needed = digits + (2 if ink.kind == "shades" else 1)
        width = min(most, max(2, needed, min(longest + 1, WIDE)))
        telling = bool(digits) and float(np.nanmax(np.abs(values))) >= LEAST_NUMBER
        return cls(ink, width, numbers=telling and matrices[0].pool == 1 and needed <= width)

    def painted(self, shown: Matrix, scale: Scale) -> list[Segments]:
        """The lines of the matrix."""
        texts = [[brief(value) for value in row] for row in shown.values] if self.numbers else ()
        return painted(scale.fractions(shown.values), self.ink, width=self.width, texts=texts)

    def ticks(self, shown: Matrix) -> str:
        """Positions of keys below the cells."""
        columns = shown.values.shape[1]
        if self.width >= NAMED and shown.pool == 1 and len(str(shown.keys[1])) < self.width:
            return "".join(f"{at:>{self.width - 1}} " for at in range(*shown.keys))
        return ticks(shown.keys[0], shown.pool, columns, self.width)


def _under(name: str, width: int, ink: Ink) -> str:
    """A name below a cell, cut where it is longer, to the right as numbers are.

    In so little room the … would take a letter that says more; its row has the whole token.
    """
    room = width - 1
    name = cut(name, room) if room < SHORTEST else name
    shown = fitted(name, min(cell_len(name), room), ink)
    return " " * (width - 1 - cell_len(shown)) + shown + " "


@dataclass(frozen=True)
class ColourBar:
    """What the colours, or shades, mean: the scale's ends and its middle, and the masked cell.

    On one line where it has room beside its words.

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
        words = f"{self.words}{kind}"
        beside = options.max_width - cell_len(words) - 2 - used
        half = max(4, min(16, (options.max_width - used) // 2))
        if beside >= 2 * SHORT:
            half = min(16, beside // 2)
            yield Segment(f"{words}  ")
        else:
            yield Text(words)
        places = np.linspace(0, 1, half)[None]
        left, right = Segment.divide(painted(places, ink, width=2)[0], [half, 2 * half])
        yield Segment(f"{ends[0]} ")
        yield from left
        yield Segment(f" {middle} ")
        yield from right
        yield Segment(f" {ends[1]}")
        yield Segment(dot, Style.parse(FAINT))
        yield Segment.line()


def pooled(matrix: Matrix, most: int) -> Matrix:
    """The matrix in at most `most` columns: a cell is the largest of a square that is not masked.

    Where weights have signs it is the one that is furthest from 0. The squares of one row may end
    early at its end; as the matrix's own did. A few rows of many columns keep a row each.
    """
    rows, columns = matrix.values.shape
    side = -(-columns // most)
    if side <= 1:
        return matrix
    tall = 1 if matrix.pool == 1 and rows <= min(TALLEST, columns // 2) else side
    grown = np.full((-(-rows // tall) * tall, -(-columns // side) * side), np.nan)
    grown[:rows, :columns] = matrix.values
    squares = grown.reshape(len(grown) // tall, tall, -1, side)
    values = np.fmax.reduce(squares, axis=(1, 3))  # NaN only where all are
    if matrix.signed:
        lowest = np.fmin.reduce(squares, axis=(1, 3))
        values = np.where(-lowest > values, lowest, values)
    return replace(matrix, pool=matrix.pool * side, values=values.astype(np.float32))


def _rows_of_a_cell(shown: Matrix) -> int:
    """How many queries a cell stands for: as many as keys, or one (see `pooled`)."""
    first, last = shown.queries
    return 1 if len(shown.values) == last - first else shown.pool


def about(shown: Matrix, given: int | None) -> Iterator[str]:
    """Which part it is, what a + marks (see `Heatmap`), and how much a cell stands for."""
    yield f"queries {span(shown.queries)} down, keys {span(shown.keys)} across"
    if given is not None and shown.queries[1] > given:
        yield f"+ written by the model, from {given} on"
    if shown.pool > 1:
        largest = "largest of either sign" if shown.signed else "largest"
        yield f"1 cell = the {largest} of {_rows_of_a_cell(shown)} × {shown.pool}"
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


def spread(values: np.ndarray) -> str:
    """`values 0.00012 … 0.98`, of what is not masked."""
    seen = values[~np.isnan(values)]
    if not seen.size:
        return "all masked"
    return f"values {number(float(seen.min()))} … {number(float(seen.max()))}"


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
