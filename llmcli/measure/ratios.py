"""Ratios of runs that were made in turns, pair by pair, and what lies in their middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """`values` in the order of the runs, and their order statistics.

    `quartiles`, the first and the third, lie between two values in proportion; of one value
    they are that value.
    """

    values: tuple[float, ...]
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
    first, _, third = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Ratios(
        values=values,
        median=median(values),
        lowest=min(values),
        highest=max(values),
        quartiles=(first, third),
    )
