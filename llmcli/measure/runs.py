"""Runs that are compared: timed alike, in turns, until their times settle, and their ratios."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import count
from statistics import fmean, median, quantiles, stdev
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

TIGHT = 0.03  # of the median: quartiles that are no further apart need no more pairs
FEWEST = 5  # pairs, before their quartiles say anything
CONFIDENCE = 0.95
_PANELS = 512  # of Simpson's rule: ten digits
Result = TypeVar("Result")


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Without Python's collector, which may take longer than a token; afterwards as before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, whose events are recorded; nothing on others."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the call's result and its seconds, including the device's work."""
    from llmcli.devices import wait_for

    wait_for(device)
    with gc_disabled():
        begin = perf_counter()
        result = call()
        wait_for(device)
        return result, perf_counter() - begin


def in_turns(*sides: Callable[[], Result]) -> Iterator[list[Result]]:
    """Yield the results of all sides round by round, in their order; each runs first in turn."""
    for first in count():
        order = [(first + at) % len(sides) for at in range(len(sides))]
        found = {at: sides[at]() for at in order}
        yield [found[at] for at in range(len(sides))]


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
    quartiles = map(_quartiles, (above, below, paired(above, below).ratios))
    return max((third - first) / middle for first, middle, third in quartiles)


def are_tight(above: Sequence[float], below: Sequence[float]) -> bool:
    """Whether these pairs are enough to trust the medians."""
    return len(below) >= FEWEST and spread_of(above, below) <= TIGHT


def _quartiles(values: Sequence[float]) -> Sequence[float]:
    """The three quartiles; of one value three times that."""
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


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


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the true mean lies with 95 % confidence (Student); None of a single value."""
    if len(values) < 2:
        return None
    mean, wide = fmean(values), two_sided(CONFIDENCE, len(values) - 1) / math.sqrt(len(values))
    return mean - wide * stdev(values), mean + wide * stdev(values)


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """When there are enough pairs: after `pairs`, or once their times are tight or time is up.

    The time began at `begin` and is over at `end` (seconds of `perf_counter`).
    """

    pairs: int | None
    begin: float = 0.0
    end: float = math.inf

    def over(self, above: Sequence[float], below: Sequence[float], now: float) -> bool:
        """Whether no further pair is run. A pair that would end too late is not begun."""
        if self.pairs is not None or not below:
            return len(below) == self.pairs
        if now + below[-1] + above[-1] > self.end:
            return True
        if len(below) % (1 + len(below) // 20):  # of many pairs a few more cost little
            return False
        return are_tight(above, below)

    def done(self, pairs: int, now: float) -> tuple[int, int]:
        """(done, total) for a progress bar: of the pairs with the runs to warm up, or of time."""
        if self.pairs is not None:
            return pairs + 1, self.pairs + 1
        share = (now - self.begin) / max(self.end - self.begin, 1e-9)
        return round(1000 * min(1.0, share)), 1000
