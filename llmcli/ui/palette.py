"""Colours for numbers: two colour maps, scales, and the cells of a terminal.

Both maps grow evenly for the eye and can be told apart by people who see few colours. They are
given by 52 of their 256 colours; between those a line is off by 2 of 255 at most.
Cells are coloured half blocks, or shades where there is no colour. Nothing is assumed of the
terminal's background: a masked cell leaves it as it is and carries a dot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal

import numpy as np
from rich.color import Color, ColorType
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from llmcli.ui.theme import FAINT

Kind = Literal["linear", "sqrt", "log"]
KINDS: tuple[Kind, ...] = ("linear", "sqrt", "log")
DECADES = 4  # of a logarithmic scale: what is less than 1/10000 of its end looks like nothing
MASKED = -1  # the code of a masked cell: it has no colour
# the terminal's own colours in the order of the maps, which only their bar can explain
_ANSI, _ANSI_DIVERGING = (8, 4, 6, 2, 3, 11), (4, 12, 6, 7, 3, 9, 1)
_DARK_ANSI = {1, 4, 8}  # those on which white is read better than black
_SHADES, _ASCII_SHADES = " ░▒▓█", " :-=+*#%@"

Segments = list[Segment]

# viridis, by Stéfan van der Walt and Nathaniel Smith (public domain): dark is little
_VIRIDIS = (
    "44015446085c471063481769481d6f482475472a7a46307e453781433d844142873f48893d4e8a3a538b"
    "38598c355e8d33638d31688e2e6d8e2c718e2a768e297b8e27808e25848e23898e218e8d20928c1f978b"
    "1e9c891fa18821a58524aa8328ae802eb37c35b7793dbc7446c06f50c46a5ac86465cb5e70cf577cd250"
    "89d54895d840a2da37b0dd2fbddf26cae11fd8e219e5e419f1e51dfde725"
)
# Kenneth Moreland's cool to warm: blue is negative, grey is zero, red is positive
_COOL_WARM = (
    "3b4cc04055c8465ecf4c66d6536edd5977e35f7fe86687ed6c8ff17396f57a9df881a4fb88abfd8fb1fe"
    "96b7ff9dbdffa3c2feaac7fdb1cbfcb7cff9bed2f6c4d5f3cad8efcfdaead5dbe5dadce0dfdbd9e4d9d2"
    "e9d5cbedd2c3f0cdbbf2c9b4f5c4acf6bea4f7b89cf7b194f7aa8cf6a385f59c7df39475f08b6eed8366"
    "e97a5fe57058e16751dc5d4ad65244d0473dca3b37c32e31bb1b2cb40426"
)


def _table(colours: str) -> np.ndarray:
    """All 256 colours of a map, `[256, 3]` uint8."""
    given = np.frombuffer(bytes.fromhex(colours), np.uint8).reshape(-1, 3)
    at, places = np.linspace(0, 255, len(given)), np.arange(256)
    parts = [np.interp(places, at, given[:, part]) for part in range(3)]
    return np.stack(parts, axis=1).round().astype(np.uint8)


VIRIDIS = _table(_VIRIDIS)
DIVERGING = _table(_COOL_WARM)


def rgb(fractions: np.ndarray, *, diverging: bool = False) -> np.ndarray:
    """The colours of numbers 0 … 1: `[...]` → `[..., 3]` uint8.

    What is outside is as the nearer end, NaN as 0: whoever draws knows what is masked.
    `diverging`: 0.5 is the middle, from which two colours go apart.
    """
    table = DIVERGING if diverging else VIRIDIS
    places = np.nan_to_num(np.asarray(fractions, np.float64), nan=0.0, posinf=1.0, neginf=0.0)
    return np.take(table, (places.clip(0, 1) * 255).round().astype(np.intp), axis=0)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From `low` to `high`. `signed`: zero is in the middle, and `low` is -`high`.

    `sqrt` and `log` give more room to small values; `log` ends at 1/10000 of `high`.
    """

    low: float
    high: float
    kind: Kind = "linear"
    signed: bool = False

    @classmethod
    def around(cls, values: Sequence[np.ndarray], kind: Kind = "linear") -> Scale:
        """The signed scale that all finite `values` fit, NaN and infinities left aside."""
        most = 0.0
        for array in values:
            finite = np.abs(array[np.isfinite(array)])
            most = max(most, float(finite.max())) if finite.size else most
        return cls(low=-(most or 1.0), high=most or 1.0, kind=kind, signed=True)

    def fractions(self, values: np.ndarray) -> np.ndarray:
        """Places 0 … 1 on the scale, of the same shape in float64; NaN stays NaN."""
        wide = np.asarray(values, np.float64)
        if self.signed:
            bent = _bent(np.abs(wide) / self.high, self.kind)
            return np.asarray(0.5 + 0.5 * np.sign(wide) * bent)
        return _bent((wide - self.low) / ((self.high - self.low) or 1.0), self.kind)

    def value(self, fraction: float) -> float:
        """The value at a place: `fractions` backwards, where that is one value."""
        if self.signed:
            side = 2 * fraction - 1
            return float(np.copysign(_unbent(abs(side), self.kind) * self.high, side))
        return self.low + _unbent(fraction, self.kind) * (self.high - self.low)


def _bent(parts: np.ndarray, kind: Kind) -> np.ndarray:
    bent: np.ndarray = parts.clip(0, 1)
    if kind == "sqrt":
        bent = np.sqrt(bent)
    elif kind == "log":
        bent = 1 + np.log10(np.maximum(bent, 10.0**-DECADES)) / DECADES
    return bent


def _unbent(part: float, kind: Kind) -> float:
    if kind == "sqrt":
        return part**2
    return 10.0 ** (DECADES * (part - 1)) if kind == "log" and part else part


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
