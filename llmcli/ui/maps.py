"""Maps with a column for each layer: heads or positions down, each cell a number of two signs.

In a terminal a cell has its ninths of the largest as a digit, so that it needs no colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from llmcli.ui import png
from llmcli.ui.grid import Grid
from llmcli.ui.layout import WIDEST, Line, fitted
from llmcli.ui.numbers import number
from llmcli.ui.page import finite
from llmcli.ui.palette import Ink, Scale
from llmcli.ui.theme import FAINT

NAME = 16  # columns of the name of a row, at most
NINTHS = 9
SIDE = 26  # pixels of a cell of the picture
COLUMN = 44  # columns of one of two lists beside each other
DIGITS = 6  # of a number in the page


@dataclass(frozen=True, kw_only=True)
class Map:
    """Values `[rows, columns]`, NaN where there is nothing; `title` says of what.

    The first `numbered` rows are heads or positions. The last `apart` rows have a scale of their
    own; `apart_title` says what they are.
    """

    title: str
    names: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
    numbered: int
    apart: int = 0
    apart_title: str = ""

    @property
    def scale(self) -> Scale:
        """Of all rows but those apart."""
        return Scale.around([self.values[: len(self.names) - self.apart]])

    @property
    def scale_apart(self) -> Scale:
        """Of the rows apart."""
        return Scale.around([self.values[len(self.names) - self.apart :]])

    def fractions(self) -> np.ndarray:
        """The places of all cells on their scales."""
        found = self.scale.fractions(self.values)
        if self.apart:
            found[-self.apart :] = self.scale_apart.fractions(self.values[-self.apart :])
        return found


def draw_map(
    of: Map, most: int | None, whole: str, width: int, ink: Ink
) -> Iterator[RenderableType | Segment]:
    """The map, in blocks of as many columns as fit: each cell in ninths of the largest."""
    ink, width = replace(ink, diverging=True), min(width, WIDEST)
    gutter = min(NAME, 5 + max(len(name) for name in of.names))  # of several heads at most
    blocks = -(-2 * len(of.columns) // max(2, width - gutter))
    of, note = pooled(of, None if most is None else most // blocks)
    gutter = min(NAME, max(len(name) for name in (*of.names, "layer"))) + 1
    cell = 3 if gutter + 3 * len(of.columns) <= width else 2
    fit, places = max(1, (width - gutter) // cell), of.fractions()
    codes = ink.codes(places)
    for first in range(0, len(of.columns), fit):
        columns, line = range(first, min(first + fit, len(of.columns))), ""
        for at, name in enumerate(of.columns[first : columns.stop]):
            start = (at + 1) * cell - len(name)
            if start > len(line) or not line:  # where it has room
                line = f"{line:<{start}}{name}"
        yield Text(f"{'layer':<{gutter}}{line}", style=FAINT)
        grid = Grid(ink=ink, gutter=gutter, before=[""] * len(columns))
        for row, name in enumerate(of.names):
            cells = [[_cell(places[row, at], int(codes[row, at]), cell, ink)] for at in columns]
            yield from grid.line(fitted(name, gutter - 1, ink).rstrip(), cells)
    parts = [f"{of.title}; 9 is {number(of.scale.high)}"]
    if of.apart:
        parts.append(f"{of.apart_title}; 9 is {number(of.scale_apart.high)}")
    yield Line([*parts, *([f"{note}, all: {whole}"] if note else [])], FAINT)


def _cell(place: float, code: int, width: int, ink: Ink) -> Segment:
    """`+9`, `−3`, a dot for what rounds to 0, nothing where there is none."""
    if np.isnan(place):
        return Segment(" " * width)
    ninths = round(2 * NINTHS * (place - 0.5))
    sign = "+" if ninths > 0 else "-" if ink.ascii else "−"
    text = f"{sign}{abs(ninths)}" if ninths else ink.dot
    return Segment(f"{text:>{width}}", ink.behind(code) if ninths else Style.parse(FAINT))


def pooled(of: Map, most: int | None) -> tuple[Map, str]:
    """At most `most` rows, and what to say of it.

    A cell is the strongest of several heads; of positions there are the strongest.
    """
    rest = range(of.numbered, len(of.names))
    if most is None or len(of.names) <= most or of.numbered < 2:
        return of, ""
    room, names = max(1, most - len(rest) - 1), []  # what is said of it takes a line
    strength = np.nan_to_num(np.abs(of.values))
    if not of.names[0].startswith("head"):
        best = np.sort(np.argsort(-strength.max(1), kind="stable")[:room])
        names, note = [of.names[at] for at in best], f"the strongest {room} of {of.numbered} rows"
        return replace(of, names=names, values=of.values[best], numbered=room), note
    each, values = -(-of.numbered // room), []
    for start in range(0, of.numbered, each):
        last = min(start + each, of.numbered) - 1
        best = start + strength[start : last + 1].argmax(0)
        values.append(of.values[best, np.arange(len(best))])
        names.append(f"head {start}–{last}" if last > start else of.names[start])
    shown = np.array([*values, *of.values[of.numbered :]])
    of = replace(of, names=[*names, *(of.names[at] for at in rest)], values=shown)
    return replace(of, numbered=len(names)), f"a cell is the strongest of {each} heads"


def beside(
    sides: Sequence[Sequence[str]], width: int, ink: Ink
) -> Iterator[RenderableType]:
    """Two lists of lines beside each other."""
    half = min(width, 2 * COLUMN) // 2
    for at in range(max(map(len, sides))):
        left, right = (side[at] if at < len(side) else "" for side in sides)
        line = f"{fitted(left, half - 1, ink)} {right}" if right else left
        yield Text(fitted(line, width, ink).rstrip(), no_wrap=True)


def signed(value: float) -> str:
    """`+0.31`, `−2`."""
    return f"{'+' if value > 0 else ''}{number(value)}"


def on_page(of: Map) -> dict[str, Any]:
    """The map for a page's script."""

    def numbers(values: np.ndarray) -> list[list[float | None]]:
        return [[finite(value, DIGITS) for value in row] for row in values.tolist()]

    return {
        "title": of.title,
        "names": of.names,
        "columns": of.columns,
        "values": numbers(of.values),
        "places": numbers(of.fractions()),
    }


def map_png(of: Map, heading: str, title: str, footer: str, ok: bool) -> bytes:
    """A map as a PNG file; `title` names the model, `ok`: whether all checks hold."""
    of, note = pooled(of, png.MOST_TOKENS)
    names, top = [png.fitted(name, png.LEAST, 200) for name in of.names], png.TOP
    left = png.MARGIN + round(max(png.width(name, png.LEAST) for name in names)) + 16
    bar = 40 + png.bar_width(of.scale, png.SMALL) + png.MARGIN
    side = max(8, min(SIDE, (png.WIDE - left - bar) // len(of.columns)))
    right, high = left + side * len(of.columns), max(200, side * len(names))
    sheet = png.Sheet(max(png.NARROW, right + bar), top + high + png.FOOT)
    sheet.headings(heading, title)
    sheet.cells((left, top), of.fractions(), side, diverging=True)
    for row, name in enumerate(names):
        sheet.text((left - 12, top + side * row + side // 2), name, png.LEAST, png.QUIET, "rm")
    for at in range(0, len(of.columns), -(-40 // side)):
        place = left + side * at + side // 2, top - 16
        sheet.text(place, of.columns[at], png.TINY, png.QUIET, "mm")
    sheet.colour_bar((right + 40, top), high, of.scale, png.SMALL)
    sheet.footer("; ".join(filter(None, [of.title, note, footer])), ok)
    return sheet.png()
