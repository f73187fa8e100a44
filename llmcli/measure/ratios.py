"""Ratios of runs that were made in turns, pair by pair, and whether they are enough. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

TIGHT = 0.03  # of the median: quartiles that are no further apart need no more pairs
FEWEST = 5  # pairs, before their quartiles say anything


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """`ratios` in the order of the runs, and their order statistics.

    `quartiles`: the first and the third, interpolated; of one value that value.
    """

    ratios: tuple[float, ...]
    median: float
    lowest: float
    highest: float
    quartiles: tuple[float, float]


def paired(above: Sequence[float], below: Sequence[float]) -> Ratios:
    """`above` ÷ `below`, pair by pair: what slows a machine down hits both of a pair alike.

    Raises ValueError where one has more values, or there are none.
    """
    values = tuple(one / other for one, other in zip(above, below, strict=True))
    if not values:
        raise ValueError("there are no pairs")
    first, _, third = _quartiles(values)
    return Ratios(
        ratios=values,
        median=median(values),
        lowest=min(values),
        highest=max(values),
        quartiles=(first, third),
    )


def spread_of(above: Sequence[float], below: Sequence[float]) -> float:
    """The distance between the quartiles as a share of the median; infinite for a single pair.

    The largest of three: that of the times `above`, of those `below`, and of their ratios.
    """
    if len(below) < 2:
        return math.inf
    found = 0.0
    for values in (above, below, paired(above, below).ratios):
        first, middle, third = _quartiles(values)
        found = max(found, (third - first) / middle)
    return found


def are_tight(above: Sequence[float], below: Sequence[float]) -> bool:
    """Whether these pairs are enough to trust the medians."""
    return len(below) >= FEWEST and spread_of(above, below) <= TIGHT


def _quartiles(values: Sequence[float]) -> Sequence[float]:
    """The three quartiles; of one value three times that."""
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
