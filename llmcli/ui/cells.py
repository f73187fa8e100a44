"""Numbers as cells of a terminal: coloured half blocks, or shades where there is no colour.

Nothing is assumed of the background: a masked cell leaves it as it is and carries a dot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal
from unicodedata import bidirectional

import numpy as np
from rich.cells import cell_len
from rich.color import Color, ColorType
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from llmcli.records.text import Token
from llmcli.ui.palette import rgb
from llmcli.ui.theme import FAINT, SPACE, quoted

MASKED = -1  # the code of a masked cell: it has no colour
# the terminal's own colours in the order of the maps, which only their bar can explain
_ANSI, _ANSI_DIVERGING = (8, 4, 6, 2, 3, 11), (4, 12, 6, 7, 3, 9, 1)
_DARK_ANSI = {1, 4, 8}  # those on which white is read better than black
_SHADES, _ASCII_SHADES = " ░▒▓█", " :-=+*#%@"

Segments = list[Segment]


@dataclass(frozen=True)
class Ink:
    """What can be shown: any colour (`rgb`), 16 of them (`ansi`), or `shades`; `ascii`: signs too.

    `diverging`: the numbers have two signs.
    """

    kind: Literal["rgb", "ansi", "shades"]
    ascii: bool = False
    diverging: bool = False

    @classmethod
    def of(cls, console: Console, options: ConsoleOptions, *, diverging: bool = False) -> Ink:
        """What this console can show."""
        system = None if console.no_color else console.color_system
        kind: Literal["rgb", "ansi", "shades"] = "shades"
        if system is not None:
            kind = "rgb" if system in ("truecolor", "256") else "ansi"
        return cls(kind, options.ascii_only, diverging)

    @property
    def halves(self) -> bool:
        """Whether a line of text can hold two rows."""
        return self.kind != "shades" and not self.ascii

    @property
    def dot(self) -> str:
        """The mark of a masked cell."""
        return "." if self.ascii else "·"

    def codes(self, fractions: np.ndarray) -> np.ndarray:
        """The number of a colour or shade for each place on the scale, -1 for NaN; same shape."""
        if self.kind == "rgb":
            parts = rgb(fractions, diverging=self.diverging).astype(np.int64)
            found = parts @ np.array([65536, 256, 1])
        else:
            most = len(self._steps()) - 1
            places = np.nan_to_num(fractions, nan=0.0).clip(0, 1) * most
            found = np.array(self._steps())[np.floor(places + 0.5).astype(np.intp)]
        return np.where(np.isnan(fractions), MASKED, found)

    def shade(self, code: int) -> str:
        """The sign for a number of `codes`, where there is no colour."""
        return self.dot if code == MASKED else (_ASCII_SHADES if self.ascii else _SHADES)[code]

    def _steps(self) -> Sequence[int]:
        if self.kind == "ansi":
            return _ANSI_DIVERGING if self.diverging else _ANSI
        return range(len(_ASCII_SHADES if self.ascii else _SHADES))

    def colour(self, code: int) -> Color:
        """The colour for a number of `codes`, where there are colours."""
        return _rgb(code) if self.kind == "rgb" else Color.from_ansi(code)

    def behind(self, code: int) -> Style:
        """The style for text in a cell: readable on the cell's colour."""
        if self.kind == "shades" or code == MASKED:
            return Style()
        if self.kind == "ansi":
            return _behind(self.colour(code), code in _DARK_ANSI)
        light = 0.299 * (code >> 16) + 0.587 * (code >> 8 & 255) + 0.114 * (code & 255)
        return _behind(self.colour(code), light < 102)  # at 102 black is as easy to read as white


def painted(
    fractions: np.ndarray, ink: Ink, *, width: int, texts: Sequence[Sequence[str]] = ()
) -> list[Segments]:
    """The lines of a matrix `[rows, columns]` of places 0 … 1, NaN masked; equal cells merged.

    A cell is `width` columns and a line; of one column it is half a line where `ink.halves`.
    `texts`: what stands in each cell, to the right, shorter than it (by two where there is no
    colour: a shade stands in front).
    """
    codes = ink.codes(fractions)
    if texts:
        rows = zip(codes.tolist(), texts, strict=True)
        return [[_lettered(*one, ink, width) for one in zip(*row, strict=True)] for row in rows]
    if width > 1 or not ink.halves:
        return [_whole(row, ink, width) for row in codes.tolist()]
    if len(codes) % 2:
        codes = np.vstack([codes, np.full((1, codes.shape[1]), MASKED)])
    return [
        _halves(upper, lower, ink)
        for upper, lower in zip(codes[::2].tolist(), codes[1::2].tolist(), strict=True)
    ]


def _lettered(code: int, text: str, ink: Ink, width: int) -> Segment:
    if code == MASKED:
        return Segment(f"{ink.dot:>{width - 1}} ", Style.parse(FAINT))
    if ink.kind == "shades":
        return Segment(f"{ink.shade(code)}{text:>{width - 2}} ")
    return Segment(f"{text:>{width - 1}} ", ink.behind(code))


def _whole(row: list[int], ink: Ink, width: int) -> Segments:
    line = []
    for code, same in groupby(row):
        count = len(list(same))
        if code == MASKED:
            dot = f"{ink.dot:<{width}}" if width < 3 else f"{ink.dot:^{width}}"
            line.append(Segment(dot * count, Style.parse(FAINT)))
        elif ink.kind == "shades":
            line.append(Segment(ink.shade(code) * width * count))
        else:
            line.append(Segment(" " * width * count, _behind(ink.colour(code), False)))
    return line


def _halves(upper: list[int], lower: list[int], ink: Ink) -> Segments:
    line = []
    for (top, bottom), same in groupby(zip(upper, lower, strict=True)):
        count = len(list(same))
        if top == bottom == MASKED:
            line.append(Segment(ink.dot * count, Style.parse(FAINT)))
        elif top == bottom:
            line.append(Segment(" " * count, _behind(ink.colour(top), False)))
        elif MASKED in (top, bottom):
            sign, code = ("▄", bottom) if top == MASKED else ("▀", top)
            line.append(Segment(sign * count, Style(color=ink.colour(code))))
        else:
            style = Style(color=ink.colour(top), bgcolor=ink.colour(bottom))
            line.append(Segment("▀" * count, style))
    return line


@lru_cache(maxsize=1024)
def _rgb(code: int) -> Color:
    return Color.from_rgb(code >> 16, code >> 8 & 255, code & 255)


def _behind(colour: Color, dark: bool) -> Style:
    # of 16 colours black and white are the terminal's; where there are more, they are black and
    # white. A new style each time: it remembers the codes of the first terminal it is written to.
    own = colour.type == ColorType.STANDARD
    letters = Color.from_ansi(15 if dark else 0) if own else _rgb(0xFFFFFF if dark else 0)
    return Style(color=letters, bgcolor=colour)


def padded(line: Segments, width: int) -> Segments:
    """The line with as many spaces after it as make it `width` columns."""
    used = sum(segment.cell_length for segment in line)
    return [*line, Segment(" " * (width - used))] if used < width else line


def fitted(text: str, width: int, ink: Ink) -> str:
    """`text` in exactly `width` columns, cut with … where it is longer.

    Letters that are written from right to left are followed by a mark that is not seen, so that
    what comes after them stays in its place. Where the terminal lacks signs they are spelled.
    """
    if ink.ascii:
        text = text.encode("ascii", "backslashreplace").decode("ascii")
    if cell_len(text) > width:
        text = cut(text, width - 1) + ("~" if ink.ascii else "…")
    gap = " " * (width - cell_len(text))
    leftward = any(bidirectional(character) in ("R", "AL", "AN") for character in text)
    return text + "\u200e" * leftward + gap


def cut(text: str, width: int) -> str:
    """As much of the beginning as fits: a wide character that does not is left out."""
    while text and cell_len(text) > width:
        text = text[:-1]
    return text


def in_cell(token: Token, ink: Ink) -> str:
    """A token in a cell: without quotes, its spaces visible; the id where it has no text."""
    shown = quoted(token.text)[1:-1].replace(" ", space(ink)) or str(token.id)
    return shown.encode("ascii", "backslashreplace").decode() if ink.ascii else shown


def space(ink: Ink) -> str:
    """The sign for a space."""
    return "_" if ink.ascii else SPACE


def in_words(token: Token) -> str:
    """A token in a sentence: quoted, or its id."""
    return quoted(token.text) if token.text else f"id {token.id}"
