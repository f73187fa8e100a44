"""Maps with a column for each layer: heads or positions down, each cell a number of two signs.

In a terminal every cell has its ninths of the largest as a digit, so that it needs no colour.
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
COLUMN = 44  # columns of one of two lists beside each other
SIDE = 26  # pixels of a cell of the picture
DIGITS = 6  # of a number in the page


@dataclass(frozen=True, kw_only=True)
class Map:
    """Values `[rows, columns]`, NaN where there is nothing; `title` says of what.

    The last `apart` rows have a scale of their own; `apart_title` says what they are.
    """

    title: str
    names: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
    apart: int = 0
    apart_title: str = ""

    @property
    def scale(self) -> Scale:
        """Of all rows but those apart."""
        return Scale.around([self.values[: len(self.names) - self.apart]])

    @property
    def largest_apart(self) -> float:
        """The largest number in the rows apart, without its sign."""
        return float(np.nanmax(np.abs(self.values[-self.apart :])))

    def fractions(self) -> np.ndarray:
        """The places of all cells on their scales."""
        found = self.scale.fractions(self.values)
        if self.apart:
            own = self.values[-self.apart :]
            found[-self.apart :] = Scale.around([own]).fractions(own)
        return found


def draw_map(
    of: Map, most: int | None, whole: str, width: int, ink: Ink
) -> Iterator[RenderableType | Segment]:
    """The map, in blocks of as many columns as fit: each cell in ninths of the largest."""
    ink = replace(ink, diverging=True)
    shown, note = fewer(of, most)
    width = min(width, WIDEST)
    gutter = min(NAME, max(len(name) for name in (*shown.names, "layer"))) + 1
    cell = 3 if gutter + 3 * len(shown.columns) <= width else 2
    fit = max(1, (width - gutter) // cell)
    codes, ninths = ink.codes(shown.fractions()), 2 * NINTHS * (shown.fractions() - 0.5)
    for first in range(0, len(shown.columns), fit):
        columns = range(first, min(first + fit, len(shown.columns)))
        grid = Grid(ink=ink, gutter=gutter, before=[""] * len(columns))
        header = _header(shown.columns, columns, cell)
        yield Text(f"{'layer':<{gutter}}{header}", style=FAINT, no_wrap=True)
        for row, name in enumerate(shown.names):
            cells = [
                [_cell(ninths[row, at], int(codes[row, at]), cell, ink)] for at in columns
            ]
            yield from grid.line(fitted(name, gutter - 1, ink).rstrip(), cells)
    parts = [f"{shown.title}; 9 is {number(shown.scale.high)}"]
    if shown.apart:
        parts.append(f"{of.apart_title}; 9 is {number(of.largest_apart)}")
    yield Line([*parts, *([f"{note}; all: {whole}" if whole else note] if note else [])], FAINT)


def _header(columns: Sequence[str], shown: range, cell: int) -> str:
    """The names of the columns over their cells, of those that have room."""
    line = ""
    for at in shown:
        start = (at - shown.start) * cell + cell - len(columns[at])
        if start >= len(line) + bool(line) or not line:
            line = f"{line:<{start}}{columns[at]}"
    return line


def _cell(ninths: float, code: int, width: int, ink: Ink) -> Segment:
    """`+9`, `−3`, a dot for what rounds to 0, nothing where there is none."""
    if np.isnan(ninths):
        return Segment(" " * width)
    digit = round(abs(ninths))
    minus = "-" if ink.ascii else "−"
    text = f"{'+' if ninths > 0 else minus}{digit}" if digit else ink.dot
    return Segment(f"{text:>{width}}", ink.behind(code) if digit else Style.parse(FAINT))


def fewer(of: Map, most: int | None) -> tuple[Map, str]:
    """At most `most` rows: the strongest of several heads, or the strongest positions."""
    heads = [name.startswith("head ") for name in of.names]
    kept = heads.count(False) if of.apart or heads[0] else 0
    rows = len(of.names) - kept
    if most is None or len(of.names) <= most or rows < 2:
        return of, ""
    room = max(1, most - kept)
    strength = np.nan_to_num(np.abs(of.values))
    if heads[0]:
        each = -(-rows // room)
        parts = [range(at, min(at + each, rows)) for at in range(0, rows, each)]
        chosen = [np.array(part)[strength[part].argmax(0)] for part in map(list, parts)]
        values = [of.values[best, np.arange(len(of.columns))] for best in chosen]
        names = [f"heads {part[0]}–{part[-1]}" if len(part) > 1 else f"head {part[0]}"
                 for part in parts]  # fmt: skip
        values += list(of.values[rows:])
        return replace(of, names=[*names, *of.names[rows:]], values=np.array(values)), (
            f"a cell is the strongest of {each} heads"
        )
    best = sorted(np.argsort(-strength.max(1), kind="stable")[:room].tolist())
    names = [of.names[at] for at in best]
    return replace(of, names=names, values=of.values[best]), f"the strongest {room} of {rows}"


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
    """`+0.31`, `-2`."""
    return f"{'+' if value > 0 else ''}{number(value)}"


def on_page(of: Map) -> dict[str, Any]:
    """The map for a page's script."""
    return {
        "title": of.title,
        "names": of.names,
        "columns": of.columns,
        "values": [[finite(v, DIGITS) for v in row] for row in of.values.tolist()],
        "places": [[finite(v, DIGITS) for v in row] for row in of.fractions().tolist()],
    }


def map_png(of: Map, heading: str, title: str, footer: str, ok: bool) -> bytes:
    """A map as a PNG file; `title` names the model, `ok`: whether all checks hold."""
    of, _ = fewer(of, png.MOST_TOKENS)
    names = [png.fitted(name, png.LEAST, 200) for name in of.names]
    left = png.MARGIN + round(max(png.width(name, png.LEAST) for name in names)) + 16
    room = png.WIDE - left - png.MARGIN - png.bar_width(of.scale, png.SMALL) - 40
    side = max(8, min(SIDE, room // len(of.columns)))
    right, bottom = left + side * len(of.columns), png.TOP + side * len(names)
    width = max(png.NARROW, right + 40 + png.bar_width(of.scale, png.SMALL) + png.MARGIN)
    sheet = png.Sheet(width, max(bottom, png.TOP + 200) + png.FOOT)
    sheet.headings(heading, title)
    sheet.cells((left, png.TOP), of.fractions(), side, diverging=True)
    for row, name in enumerate(names):
        sheet.text((left - 12, png.TOP + side * row + side // 2), name, png.LEAST, png.QUIET, "rm")
    for at in range(0, len(of.columns), -(-40 // side)):
        place = left + side * at + side // 2, png.TOP - 16
        sheet.text(place, of.columns[at], png.TINY, png.QUIET, "mm")
    sheet.colour_bar((right + 40, png.TOP), max(160, bottom - png.TOP), of.scale, png.SMALL)
    sheet.footer(footer, ok)
    return sheet.png()
