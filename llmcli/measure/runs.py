"""Runs that are compared: timed alike, in turns, until their times settle."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import TypeVar

import torch

from llmcli.devices import wait_for
from llmcli.measure.ratios import are_tight

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
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the call's result and its seconds, including the device's work."""
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
