"""Times, rates and shares as columns of them can be compared."""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.render.numbers import scaled
from llmcli.reports.timing import PhaseTime


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


def a_token(phase: PhaseTime, amount: float) -> tuple[float, str]:
    """Of decode what falls to one token, and the words for that; of prefill all."""
    return (amount / phase.tokens, " a token") if phase.name == "decode" else (amount, "")
