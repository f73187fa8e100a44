"""The ladder as a PNG: one bar a rung, tokens per second on a logarithmic scale."""

from __future__ import annotations

import math

from llmcli.commands.ladder.report import LadderReport, RungReport
from llmcli.commands.ladder.view.table import power_below, times
from llmcli.ui.png import FOOT, GRID, HEAD, INK, MARGIN, QUIET, SMALL, Sheet, width
from llmcli.ui.rates import scaled

WIDTH, ROW, BAR = 1600, 64, 40
NAMES, VALUES = 270, 300  # pixels left of the bars and right of them
FILL, ESTIMATED, WRONG = (38, 108, 180), (158, 192, 226), (200, 50, 40)


def ladder_png(report: LadderReport, title: str) -> bytes:
    """The chart as a PNG file. `title` names the model and how it was computed."""
    top = HEAD
    bottom = top + ROW * len(report.rungs)
    sheet = Sheet(WIDTH, bottom + 40 + FOOT)
    rates = [1 / rung.token_s.median for rung in report.rungs]
    lowest = power_below(rates)
    highest = math.ceil(math.log10(max(rates)) + 1e-9)
    room = WIDTH - 2 * MARGIN - NAMES - VALUES

    def place(power: float) -> int:
        return MARGIN + NAMES + round(room * (power - lowest) / (highest - lowest))

    sheet.headings("The ladder", title)
    for power in range(lowest, highest + 1):
        sheet.draw.line([(place(power), top), (place(power), bottom)], fill=GRID, width=2)
        sheet.text((place(power), bottom + 12), _power(power), SMALL, QUIET, "ma")
    for row, (rung, rate) in enumerate(zip(report.rungs, rates, strict=True)):
        _bar(sheet, rung, rate, top + row * ROW, place(lowest), place(math.log10(rate)))
    under = f"tokens per second after a prompt of {len(report.ids)}, logarithmic scale"
    if any(rung.estimated for rung in report.rungs):
        under += "; pale: estimated"
    sheet.footer(under, report.ok)
    return sheet.png()


def _bar(sheet: Sheet, rung: RungReport, rate: float, y: int, left: int, right: int) -> None:
    """The rung's name, its bar, its rate and its speed-up over the rung below."""
    middle = y + ROW // 2
    fill = WRONG if not rung.ok else ESTIMATED if rung.estimated else FILL
    sheet.text((MARGIN, middle), f"{rung.number}  {rung.name}", 28, INK, "lm")
    end = max(right, left + 4)
    sheet.draw.rectangle([(left, middle - BAR // 2), (end, middle + BAR // 2)], fill)
    words = f"{'≈' if rung.estimated else ''}{scaled(rate)}/s"
    if rung.token_speedup is not None:
        words += f"   × {times(rung.token_speedup)}"
    if not rung.ok:
        words += "   WRONG"
    # no grid line through the numbers
    box = (end + 14, middle - 16), (end + 14 + round(width(words, SMALL)), middle + 16)
    sheet.draw.rectangle(box, "white")
    sheet.text((end + 14, middle), words, SMALL, INK, "lm")


def _power(power: int) -> str:
    """`0.01`, `1`, `1000`."""
    return f"{10**power:g}" if power < 0 else f"{10**power:,}"
