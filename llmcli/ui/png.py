"""What the pictures share: a white sheet for a paper, text that any token can be, a colour bar.

Drawn with Pillow alone. The font that comes with it has the signs of English; others are taken
from a font of this machine where there is one, else they are spelled out.
"""

from __future__ import annotations

import io
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcli.records.text import Token
from llmcli.ui.layout import filled
from llmcli.ui.numbers import tick
from llmcli.ui.palette import DECADES, Scale, rgb
from llmcli.ui.theme import SPACE, escaped, quoted

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

DPI = 300
INK, QUIET, GRID, RED = (25, 25, 30), (105, 105, 115), (222, 222, 228), (200, 40, 30)
MASKED, HATCH = (246, 246, 248), (219, 219, 226)
# pixels: two columns of a paper, and one; the margin; the room of the headings and of the footer
WIDE, NARROW = 2080, 1240
MARGIN, HEAD, FOOT = 44, 150, 112
TITLE, SMALL, FINE, LEAST = 40, 26, 22, 20  # font sizes; the least is what can be read on paper
LINE = 24  # pixels of a line of the least size
TINY = LEAST - 4  # of numbers that one can do without
BAR = 26  # pixels that a colour bar is wide
# of a grid of tokens: pixels of a row, and between two boxes; where the first row begins
ROW, BOX_GAP, TOP = 36, 3, HEAD + 44
MOST_TOKENS = 32  # with more, nothing could be read on paper
# found by name in the system's folders; the first that has a sign draws it
_FONTS = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "LiberationSans-Regular.ttf",
    "Arial Unicode.ttf",
    "Arial.ttf",
    "seguisym.ttf",
    "NotoSansCJK-Regular.ttc",
    "PingFang.ttc",
    "msyh.ttc",
    "NotoEmoji-Regular.ttf",
)
_PLAIN = {"×": "x", "≈": "~", "→": "to", "−": "-", "≥": ">=", "≤": "<=", "‖": "|", SPACE: "_"}

Colour = tuple[int, int, int]


class Sheet:
    """A white picture, written to as on paper; places are pixels from the upper left corner."""

    def __init__(self, width: int, height: int) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (width, height), "white")
        self.draw = ImageDraw.Draw(self.image)

    def text(
        self, at: tuple[int, int], words: str, size: int, fill: Colour = INK, anchor: str = "la"
    ) -> None:
        """Words on one line. `anchor`: Pillow's: l, m, r across and a, m, s down."""
        x = float(at[0]) - {"l": 0.0, "m": 0.5, "r": 1.0}[anchor[0]] * width(words, size)
        for font, run in _runs(words, size):
            self.draw.text((x, at[1]), run, font=font, fill=fill, anchor=f"l{anchor[1]}")
            x += font.getlength(run)

    def turned(self, at: tuple[int, int], words: str, size: int, fill: Colour = INK) -> None:
        """Words that read upwards, in the middle of x, and end at y."""
        from PIL import Image

        line = Sheet(max(1, round(width(words, size))), round(size * 1.5))
        line.draw.rectangle(((0, 0), line.image.size), "black")
        line.text((0, line.image.height // 2), words, size, (255, 255, 255), "lm")
        mask = line.image.convert("L").rotate(90, expand=True)
        place = at[0] - mask.width // 2, at[1]
        self.image.paste(Image.new("RGB", mask.size, fill), place, mask)

    def cells(
        self, at: tuple[int, int], fractions: np.ndarray, cell: int, *, diverging: bool = False
    ) -> None:
        """A matrix `[rows, columns]` of places 0 … 1 on a scale in squares; NaN is masked.

        What is masked looks like no number: nearly white, hatched where grey is a number.
        """
        from PIL import Image

        colours = rgb(fractions, diverging=diverging)
        colours = np.kron(colours, np.ones((cell, cell, 1), np.uint8))
        masked = np.kron(np.isnan(fractions), np.ones((cell, cell), bool))
        colours[masked] = MASKED
        if diverging:
            rows, columns = np.indices(masked.shape)
            colours[masked & ((rows + columns) % 12 < 2)] = HATCH
        self.image.paste(Image.fromarray(colours), at)

    def box(self, at: tuple[int, int], size: tuple[int, int], fraction: float, words: str) -> None:
        """A cell in the colour of a place 0 … 1, with lines of words that can be read on it.

        NaN is masked: nearly white, with a line across.
        """
        ends = at, (at[0] + size[0] - 1, at[1] + size[1] - 1)
        if math.isnan(fraction):
            self.draw.rectangle(ends, MASKED, GRID)
            self.draw.line((at[0], ends[1][1], ends[1][0], at[1]), HATCH, 2)
            return
        colour = rgb(np.array(fraction))
        self.draw.rectangle(ends, (int(colour[0]), int(colour[1]), int(colour[2])))
        fill, lines = (255, 255, 255) if dark(colour) else INK, words.split("\n")
        top = at[1] + size[1] // 2 - LINE // 2 * (len(lines) - 1)
        for number, line in enumerate(lines):
            middle = at[0] + size[0] // 2, top + LINE * number
            self.text(middle, line, LEAST, fill, "mm")

    def frame(self, at: tuple[int, int], columns: int, rows: int, fill: Colour = QUIET) -> None:
        """A thin line around what is `columns` pixels wide and `rows` high."""
        left, top = at[0] - 2, at[1] - 2
        self.draw.rectangle(((left, top), (left + columns + 3, top + rows + 3)), None, fill, 2)

    def colour_bar(self, at: tuple[int, int], height: int, scale: Scale, size: int) -> None:
        """The scale upright, its ends and three values between them written beside it."""
        places = np.linspace(1, 0, height)[:, None].repeat(BAR, 1)
        self.cells(at, places, 1, diverging=scale.signed)
        self.frame(at, BAR, height)
        for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = at[1] + round((1 - fraction) * (height - 1))
            right = at[0] + BAR
            self.draw.line(((right + 2, y), (right + 9, y)), QUIET, 2)
            self.text((right + 16, y), _mark(scale, fraction), size, QUIET, "lm")

    def headings(self, words: str, title: str) -> None:
        """The heading and the model's line, at the top."""
        room = self.image.width - 2 * MARGIN
        self.text((MARGIN, MARGIN), fitted(words, TITLE, room), TITLE)
        self.text((MARGIN, MARGIN + 54), fitted(title, SMALL, room), SMALL, QUIET)

    def footer(self, words: str, ok: bool) -> None:
        """How to read it, on two lines at most; where a check does not hold, that instead."""
        x, bottom = MARGIN, self.image.height - MARGIN + 14
        if not ok:
            self.text((x, bottom), "A CHECK FAILED: do not trust these numbers", SMALL, RED, "ls")
            return
        room = self.image.width - 2 * MARGIN
        lines = filled(words.split("; "), room, "; ", lambda line: width(line, FINE))
        for up, line in enumerate(reversed(lines[:2])):
            self.text((x, bottom - 32 * up), fitted(line, FINE, room), FINE, QUIET, "ls")

    def png(self) -> bytes:
        """The picture as a PNG file of 300 dots per inch."""
        file = io.BytesIO()
        self.image.save(file, "PNG", dpi=(DPI, DPI), optimize=True)
        return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class BoxGrid:
    """A grid of boxes, each row with its name on the left.

    `left`, `top`: pixels before the first column and above the first row. `across`, `down`: pixels
    of a column and of a row, of which `gap` part the boxes; before the columns `parted` there are
    more. `cell(row, column)`: the parts of a box side by side, each with the place of its colour
    and its words; none where there is no box.
    """

    left: int
    across: int
    names: Sequence[str]
    columns: int
    cell: Callable[[int, int], Sequence[tuple[float, str]]]
    top: int = TOP
    down: int = ROW
    gap: int = BOX_GAP
    parted: Sequence[int] = ()

    @property
    def right(self) -> int:
        """Pixels up to the end of the last column."""
        return self.corner(0, self.columns - 1)[0] + self.across

    @property
    def bottom(self) -> int:
        """Pixels up to the end of the last row."""
        return self.top + self.down * len(self.names)

    def corner(self, row: int, column: int) -> tuple[int, int]:
        """The upper left corner of a box."""
        more = sum(at <= column for at in self.parted) * max(3, self.across // 6)
        return self.left + column * self.across + more, self.top + row * self.down

    def draw(self, sheet: Sheet) -> None:
        """The names of the rows, as many as have room, and the boxes."""
        for row in range(0, len(self.names), -(-LEAST * 6 // (5 * self.down))):
            at = self.left - 12, self.corner(row, 0)[1] + (self.down - self.gap) // 2
            sheet.text(at, self.names[row], LEAST, QUIET, "rm")
        for row, column in product(range(len(self.names)), range(self.columns)):
            parts, (x, y) = self.cell(row, column), self.corner(row, column)
            wide = self.across - self.gap
            edges = [x + wide * at // max(1, len(parts)) for at in range(len(parts) + 1)]
            for (begin, end), (fraction, words) in zip(pairwise(edges), parts, strict=True):
                sheet.box((begin, y), (end - begin, self.down - self.gap), fraction, words)

    def numbers(self, sheet: Sheet, numbers: Sequence[int], size: int) -> None:
        """The numbers of columns above them, as many as have room."""
        step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * self.across >= 40)
        for column in range(0, self.columns, step):
            at = self.corner(0, column)[0] + self.across // 2, self.top - 16
            sheet.text(at, str(numbers[column]), size, QUIET, "mm")


@dataclass(frozen=True, kw_only=True)
class TokenGrid(BoxGrid):
    """A grid whose columns are tokens: boxes below their texts and positions.

    `written`: the first column whose token the model wrote.
    """

    tokens: Sequence[Token]
    positions: Sequence[int]
    written: int

    def draw(self, sheet: Sheet) -> None:
        """The names of rows and columns, the boxes, and a line before what the model wrote."""
        super().draw(sheet)
        for column, token in enumerate(self.tokens):
            self.words(sheet, column, HEAD + 6, label(token))
            self.words(sheet, column, HEAD + 30, str(self.positions[column]), QUIET, TINY)
            if column == self.written:
                x = self.corner(0, column)[0]
                line = (x - BOX_GAP, HEAD - 8), (x - 1, self.bottom - BOX_GAP - 1)
                sheet.draw.rectangle(line, INK)

    def words(
        self, sheet: Sheet, column: int, y: int, words: str, fill: Colour = INK, size: int = LEAST
    ) -> None:
        """Words in the middle of a column."""
        x = self.corner(0, column)[0] + (self.across - BOX_GAP) // 2
        room = self.across - BOX_GAP - (0 if size == TINY else 8)
        sheet.text((x, y), fitted(words, size, room), size, fill, "mm")


def bar_width(scale: Scale, size: int) -> int:
    """Pixels that a colour bar takes with its values."""
    values = [_mark(scale, fraction) for fraction in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return BAR + 18 + round(max(width(value, size) for value in values))


def _mark(scale: Scale, fraction: float) -> str:
    """The value at a place of the bar; a logarithm has no zero, all that is less is its end."""
    if scale.kind == "log" and not scale.signed and fraction == 0:
        return f"< {tick(scale.high * 10.0**-DECADES)}"
    return tick(scale.value(fraction))


def width(words: str, size: int) -> float:
    """Pixels that the words take on one line."""
    return float(sum(font.getlength(run) for font, run in _runs(words, size)))


def fitted(words: str, size: int, room: float) -> str:
    """The words, cut with … where they do not fit `room` pixels; a sign keeps its marks."""
    if width(words, size) <= room:
        return words
    clusters = _clusters(words)
    while clusters and width("".join(clusters) + "…", size) > room:
        clusters.pop()
    return "".join(clusters) + "…"


def label(token: Token) -> str:
    """A token as a label: its spaces are visible, so that one can see where a word begins."""
    return quoted(token.text)[1:-1].replace(" ", SPACE) if token.text else f"#{token.id}"


def dark(colour: np.ndarray) -> bool:
    """Whether white is read better than black on it."""
    return float(colour @ np.array([0.299, 0.587, 0.114])) < 120


def _runs(words: str, size: int) -> list[tuple[FreeTypeFont, str]]:
    """The words in pieces of one font each."""
    found = [(_chosen(cluster), cluster) for cluster in _clusters(words)]
    spelled = [
        (n, one if n >= 0 else "".join(_PLAIN.get(sign) or escaped(sign) for sign in one))
        for n, one in found
    ]
    groups = groupby(spelled, lambda pair: max(0, pair[0]))
    return [(_font(font, size), "".join(sign for _, sign in run)) for font, run in groups]


def _clusters(words: str) -> list[str]:
    """The signs of the words, each with the marks above and below it."""
    found: list[str] = []
    for sign in unicodedata.normalize("NFC", words):
        if found and unicodedata.combining(sign):
            found[-1] += sign
        else:
            found.append(sign)
    return found


@lru_cache(maxsize=4096)
def _chosen(cluster: str) -> int:
    """The number of the first font that has these signs, 0 the one of Pillow; -1 if none has."""
    for index in range(len(_FONTS) + 1):
        font = _font(index, 32)
        if font is None:
            continue
        # a sign that a font lacks is drawn as any other such sign
        lacking = font.getmask("\uffff")
        masks = [font.getmask(sign) for sign in cluster if sign != " "]
        if not any(one.size == lacking.size and bytes(one) == bytes(lacking) for one in masks):
            return index
    return -1


@lru_cache(maxsize=256)
def _font(index: int, size: int) -> Any:
    """Pillow's own font for 0, else one of the system's, None where it is not there."""
    from PIL import ImageFont

    if index == 0:
        return ImageFont.load_default(size)
    try:
        return ImageFont.truetype(_FONTS[index - 1], size)
    except OSError:
        return None
