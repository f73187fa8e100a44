"""Numbers as views show them: times, sizes, rates, shares, and what fits into a cell."""

from __future__ import annotations

import math
from collections.abc import Sequence


def milliseconds(seconds: float, digits: int) -> str:
    """`12.340`: the same digits after the point in a whole column."""
    return f"{seconds * 1000:,.{digits}f}"


def digits_for(seconds: Sequence[float]) -> int:
    """Digits after the point of milliseconds, such that the largest one has at least four."""
    largest = max(seconds, default=0.0) * 1000
    return 1 if largest >= 1000 else 2 if largest >= 100 else 3


def percent(share: float) -> str:
    """`71 %`, `8.3 %`, `0.04 %`: two digits at least."""
    value = share * 100
    if abs(value) >= 9.95:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if abs(value) >= 0.05 or not value else f"{value:.2f} %"


def signed_percent(ratio: float) -> str:
    """`+1.2 %` for 1.012."""
    return f"{(ratio - 1) * 100:+.1f} %".replace("-", "−")


def probability(share: float) -> str:
    """`50.00%`, and two significant digits of what is less than a tenth of a percent: `0.0082%`."""
    value = 100 * share
    return f"{value:.2f}%" if value >= 0.1 else f"{value:.2g}%"


def unit(value: float, name: str) -> str:
    """`538 MB`, `36.2 GFLOP`, in steps of 1000, so that it divides by a rate."""
    number, _, prefix = scaled(value).partition(" ")
    return f"{number} {prefix}{name}"


def rate(amount: float, seconds: float) -> str:
    """Billions a second, three digits; nothing where there is no amount or no time."""
    return f"{amount / seconds / 1e9:.3g}" if amount and seconds > 0 else ""


def speed(tokens_per_s: float) -> str:
    """`653 tok/s`."""
    if tokens_per_s >= 100:
        return f"{tokens_per_s:,.0f} tok/s"
    return f"{tokens_per_s:.3g} tok/s"


def scaled(value: float) -> str:
    """`37`, `0.25`, `36.2 M`: three digits and a unit's prefix."""
    scales = ((" P", 1e15), (" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3))
    for prefix, scale in scales:
        if value >= scale * 0.9995:
            return f"{value / scale:.3g}{prefix}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """`52 ms`, `1.24 s` or `2 min 5 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def size(nbytes: int) -> str:
    """`412 MiB` or `1.25 GiB`."""
    if nbytes < 2**10:
        return f"{nbytes} B"
    for unit, scale in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)):
        value = nbytes / scale
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value:.0f} {unit}"


def number(value: float | None, digits: int = 3) -> str:
    """So many digits, with a minus sign; – for what is not there."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value + 0.0:.{digits}g}".replace("-", "−")


def tick(value: float) -> str:
    """Three digits of a value at a colour bar: `0`, `0.25`, `-12.5`, `1e-04`."""
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.0e}"


def brief(value: float) -> str:
    """A number in a cell: `.07`, `1.0`, `−3.4`, `12`."""
    size = abs(float(value))
    if size < 0.995:
        digits = f"{size:.2f}"[1:]
        return digits if value > 0 or digits == ".00" else f"−{digits}"
    digits = f"{size:.1f}" if size < 9.95 else f"{size:.0f}"
    return digits if value > 0 else f"−{digits}"


def short(value: float, share: bool) -> str:
    """At most four signs: `.07` and `1.0` of a share, `7.43`, `12.1`, `1234` of anything else."""
    if math.isinf(value):
        return "∞"
    if share:
        return f"{value:.2f}".lstrip("0") if abs(value) < 0.995 else f"{value:.1f}"
    size = abs(value)
    return f"{value:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def span(positions: tuple[int, int]) -> str:
    """`40:80` for positions 40 … 79, as `--query` takes them, `7` for a single one."""
    first, last = positions
    return str(first) if last - first == 1 else f"{first}:{last}"
