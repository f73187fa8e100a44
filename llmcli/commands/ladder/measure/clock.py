"""Seconds of a computation on any device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter

from torch import Tensor

from llmcli import devices
from llmcli.commands.ladder.report import Spread


def timed(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What `call` returns, and the seconds until it was there: a GPU is waited for."""
    begin = perf_counter()
    out = call()
    devices.wait_for(out.device)
    return out, perf_counter() - begin


def spread(seconds: Sequence[float]) -> Spread:
    """Median, least and most of repeated runs."""
    return Spread(
        median=statistics.median(seconds),
        lowest=min(seconds),
        highest=max(seconds),
        runs=len(seconds),
    )
