"""Rates whose runs scatter: several as one, and how sure the ratio of two is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmcli.commands.bench.measure.student import two_sided
from llmcli.commands.bench.report.comparison import Rate

USUAL_RUNS = 5  # llama-bench's own, taken where a file does not say how many there were
CONFIDENCE = 0.95
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
    return Rate(mean=mean, std=math.sqrt((within + between) / (runs - 1)), runs=runs)


def interval(a: Rate, b: Rate) -> tuple[float, float] | None:
    """Where B ÷ A lies with 95 % confidence; None where one side cannot tell its spread.

    Welch's interval for the difference of the logarithms, their variances (σ ÷ mean)² ÷ runs.
    """
    if any(runs_of(rate) < 2 or (rate.runs is None and not rate.std) for rate in (a, b)):
        return None
    parts = [((rate.std / rate.mean) ** 2 / runs_of(rate), runs_of(rate) - 1) for rate in (a, b)]
    variance = sum(part for part, _ in parts)
    ratio = b.mean / a.mean
    if variance == 0.0:
        return ratio, ratio
    freedom = 1.0 / sum((part / variance) ** 2 / degrees for part, degrees in parts)
    wide = min(two_sided(CONFIDENCE, freedom) * math.sqrt(variance), _WIDEST)
    return ratio * math.exp(-wide), ratio * math.exp(wide)


def runs_of(rate: Rate) -> int:
    """How many, or the usual number where nobody says."""
    return USUAL_RUNS if rate.runs is None else rate.runs
