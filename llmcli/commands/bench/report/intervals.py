"""Rates whose runs scatter: several as one, and how sure the ratio of two is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from statistics import fmean, stdev

from llmcli.commands.bench.report.comparison import Rate

USUAL_RUNS = 5  # llama-bench's own, taken where a file does not say how many there were
CONFIDENCE = 0.95
_STRONGEST = 0.8  # correlation of neighbours: of a stronger one a few runs tell nothing
_WIDEST = 600.0  # of a logarithm: its exponential is still a number


def pool(rates: Sequence[Rate]) -> Rate:
    """All runs as one sample: what mean and deviation would be if they were counted together.

    Where one of them does not say how many runs it had, the usual number is taken for it.
    """
    if len(rates) == 1:
        return rates[0]
    counts = [runs_of(rate) for rate in rates]
    runs = sum(counts)
    pairs = list(zip(counts, rates, strict=True))
    mean = sum(count * rate.mean for count, rate in pairs) / runs
    within = sum((count - 1) * rate.std**2 for count, rate in pairs)
    between = sum(count * (rate.mean - mean) ** 2 for count, rate in pairs)
    known = [rate.correlation for rate in rates if rate.correlation is not None]
    return Rate(
        mean=mean,
        std=math.sqrt((within + between) / (runs - 1)),
        runs=runs,
        correlation=fmean(known) if len(known) == len(rates) else None,
    )


def correlation(runs: Sequence[float]) -> float | None:
    """Lag-1 autocorrelation of the runs, -1 … 1; None of fewer than three or of equal ones."""
    middle = fmean(runs)
    off = [run - middle for run in runs]
    whole = sum(one * one for one in off)
    if len(runs) < 3 or whole == 0.0:
        return None
    return sum(one * next for one, next in pairwise(off)) / whole


def interval(a: Rate, b: Rate, *, independent: bool = False) -> tuple[float, float] | None:
    """Where B ÷ A lies with 95 % confidence; None where one side cannot tell its spread.

    Welch's interval for the difference of the logarithms, their variances (σ ÷ mean)² ÷ runs.
    Unless the runs are taken as `independent`, wider by what their likeness to their neighbours
    hides, as on a machine that others use: the variance of a mean of an AR(1) process.
    """
    if any(runs_of(rate) < 2 or (rate.runs is None and not rate.std) for rate in (a, b)):
        return None
    parts = [_variance(rate, 0.0 if independent else _likeness(rate)) for rate in (a, b)]
    variance = sum(part for part, _ in parts)
    ratio = b.mean / a.mean
    if variance == 0.0:
        return ratio, ratio
    freedom = 1.0 / sum((part / variance) ** 2 / degrees for part, degrees in parts)
    return _around(ratio, math.sqrt(variance), max(freedom, 1.0))


def interval_of_pairs(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Where the true ratio of runs made in turns lies with 95 % confidence; None of one pair.

    Student's interval for the mean of the logarithms.
    """
    if len(ratios) < 2:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    error = stdev(logs) / math.sqrt(len(logs))
    return _around(math.exp(fmean(logs)), error, len(logs) - 1)


def _around(ratio: float, error: float, freedom: float) -> tuple[float, float]:
    wide = min(two_sided(CONFIDENCE, freedom) * error, _WIDEST)
    return ratio * math.exp(-wide), ratio * math.exp(wide)


def _likeness(rate: Rate) -> float:
    """The AR(1) coefficient to reckon with: an estimate without its bias, and a standard error.

    A sample of n runs shows (1 + 4ρ) ÷ n too little of it (Kendall 1954). Where the order of the
    runs is not known it shows none.
    """
    runs, shown = runs_of(rate), rate.correlation or 0.0
    likely = shown + (1.0 + 4.0 * shown) / runs + 1.0 / math.sqrt(runs)
    return min(max(likely, 0.0), _STRONGEST)


def _variance(rate: Rate, likeness: float) -> tuple[float, float]:
    """Variance of the mean's logarithm, and its degrees of freedom, for AR(1) runs."""
    runs, kept = runs_of(rate), 1.0 - likeness
    # of the mean, as a multiple of that of independent runs; and what the runs' deviation from
    # their own mean shows of theirs from the true one
    grown = 1.0 + 2.0 * likeness / kept * (1.0 - (1.0 - likeness**runs) / (runs * kept))
    shown = 1.0 - (grown - 1.0) / (runs - 1)
    freedom = (runs - 1) * (1.0 - likeness**2) / (1.0 + likeness**2)
    return (rate.std / rate.mean) ** 2 / runs * grown / shown, freedom


def runs_of(rate: Rate) -> int:
    """Number of runs; llama-bench's default (5) if the file does not say."""
    return USUAL_RUNS if rate.runs is None else rate.runs


_PANELS = 512  # of Simpson's rule: ten digits


@cache
def two_sided(confidence: float, freedom: float) -> float:
    """The t for which |T| ≤ t with that probability (0 … 1), at `freedom` ≥ 1 degrees of freedom.

    With t = √ν tan θ the density of θ is cos^(ν - 1) θ over its integral from 0 to π/2. It falls,
    so that Newton's method climbs to the θ from below.
    """
    half = math.lgamma(freedom / 2.0) - math.lgamma((freedom + 1.0) / 2.0)
    whole = math.sqrt(math.pi) / 2.0 * math.exp(half)
    angle = 0.0
    for _ in range(100):
        wide = angle / _PANELS
        at = [math.cos(wide * place) ** (freedom - 1.0) for place in range(_PANELS + 1)]
        inside = wide / 3.0 * (at[0] + 4.0 * sum(at[1::2]) + 2.0 * sum(at[2:-1:2]) + at[-1])
        more = (confidence * whole - inside) / at[-1]
        angle += more
        if more <= 1e-14 * angle:
            break
    return math.sqrt(freedom) * math.tan(angle)
