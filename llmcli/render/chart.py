"""The climb as a PNG: one bar a rung, tokens per second on a logarithmic scale.

Drawn with Pillow and the font that comes with it, which has no signs beyond plain Latin: `x`
stands for ×, `~` for ≈.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from llmcli.render.ladder import power_below, scaled, times
from llmcli.reports.ladder import LadderReport, RungReport

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

# pixels; for a column of a paper at 300 dots per inch
WIDTH, MARGIN, ROW, BAR = 1600, 40, 64, 40
NAMES, VALUES = 270, 300  # columns left of the bars and right of them
INK, QUIET, GRID = (25, 25, 30), (110, 110, 120), (224, 224, 230)
FILL, ESTIMATED, WRONG = (38, 108, 180), (158, 192, 226), (200, 50, 40)


def ladder_png(report: LadderReport, title: str) -> bytes:
    """The chart as a PNG file. `title` names the model and how it was computed."""
    from PIL import Image, ImageDraw

    top = MARGIN + 120
    height = top + ROW * len(report.rungs) + MARGIN + 60
    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    rates = [1 / rung.token_s.median for rung in report.rungs]
    lowest = power_below(rates)
    highest = math.ceil(math.log10(max(rates)) + 1e-9)
    room = WIDTH - 2 * MARGIN - NAMES - VALUES

    def place(power: float) -> int:
        return MARGIN + NAMES + round(room * (power - lowest) / (highest - lowest))

    _text(draw, (MARGIN, MARGIN), f"The ladder: {_cut(_plain(title))}", 36, INK)
    under = f"tokens per second after a prompt of {len(report.ids)}, on a logarithmic scale"
    if any(rung.estimated for rung in report.rungs):
        under += " (pale: estimated)"
    _text(draw, (MARGIN, MARGIN + 52), under, 24, QUIET)
    bottom = top + ROW * len(report.rungs)
    for power in range(lowest, highest + 1):
        draw.line([(place(power), top), (place(power), bottom)], fill=GRID, width=2)
        _text(draw, (place(power), bottom + 12), _power(power), 24, QUIET, anchor="ma")
    for row, (rung, rate) in enumerate(zip(report.rungs, rates, strict=True)):
        _bar(draw, rung, rate, top + row * ROW, place(lowest), place(math.log10(rate)))
    file = io.BytesIO()
    image.save(file, "PNG", dpi=(300, 300), optimize=True)
    return file.getvalue()


def _bar(draw: ImageDraw, rung: RungReport, rate: float, y: int, left: int, right: int) -> None:
    """The rung's name, its bar, its rate and its speed-up over the rung below."""
    middle = y + ROW // 2
    fill = WRONG if not rung.ok else ESTIMATED if rung.estimated else FILL
    _text(draw, (MARGIN, middle), f"{rung.number}  {_plain(rung.name)}", 28, INK, anchor="lm")
    draw.rectangle([(left, middle - BAR // 2), (max(right, left + 4), middle + BAR // 2)], fill)
    words = f"{'~' if rung.estimated else ''}{scaled(rate)}/s"
    if rung.token_speedup is not None:
        words += f"   x {times(rung.token_speedup)}"
    if not rung.ok:
        words += "   WRONG"
    at = (max(right, left + 4) + 14, middle)
    draw.rectangle(_box(draw, at, words, 26), "white")  # no grid line through the numbers
    _text(draw, at, words, 26, INK, anchor="lm")


def _text(
    draw: ImageDraw,
    at: tuple[int, int],
    text: str,
    size: int,
    fill: tuple[int, int, int],
    anchor: str | None = None,
) -> None:
    draw.text(at, text, font=_font(size), fill=fill, anchor=anchor)


def _box(draw: ImageDraw, at: tuple[int, int], text: str, size: int) -> Any:
    return draw.textbbox(at, text, font=_font(size), anchor="lm")


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _cut(title: str) -> str:
    """The end of a title that is too long: a path says most there."""
    return title if len(title) <= 70 else f"...{title[-67:]}"


def _power(power: int) -> str:
    """`0.01`, `1`, `1000`."""
    return f"{10**power:g}" if power < 0 else f"{10**power:,}"


def _plain(text: str) -> str:
    """`text` in the signs that the font has."""
    spelled = text.replace("→", "to").replace("×", "x").replace("≈", "~")
    return spelled.encode("latin-1", "replace").decode("latin-1")
