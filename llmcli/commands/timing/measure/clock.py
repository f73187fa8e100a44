"""Clocks that the decoder calls as it goes: when was each activation computed?"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from llmcli.devices import wait_for

END = "end"  # what the last mark of a run is called


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The marks of one run: `names[i]` came `seconds[i]` after the mark before it.

    The first counts from the beginning of the run, the last is `end`. `seconds` are the device's,
    `host_s` what passed on the host meanwhile: the same where the host computes.
    """

    names: tuple[str, ...]
    seconds: array[float]
    host_s: array[float]


class RunClock:
    """A clock for one run after another: the host's time when each mark was made."""

    _per_s = 1e9

    def __init__(self) -> None:
        self._names: list[str] = []
        self._times: list[int] = []

    def start(self) -> None:
        """The run begins now."""
        self._times.append(self._now())

    def __call__(self, name: str) -> None:
        """Mark an activation as computed (on a GPU: as started)."""
        self.start()
        self._names.append(name)

    def stop(self) -> None:
        """The run is over."""
        self(END)

    def marks(self) -> Marks:
        """Return the marks after `stop` and forget them, since freeing them in a run takes time.

        Each name is one string however often it was marked: those of many runs are kept.
        """
        names = tuple(map(sys.intern, self._names))
        seconds = array("d", ((b - a) / self._per_s for a, b in pairwise(self._times)))
        self._names, self._times = [], []
        return Marks(names=names, seconds=seconds, host_s=seconds)

    def _now(self) -> int:
        return perf_counter_ns()


class HostClock(RunClock):
    """For a CPU, where an operation is done when its call returns."""

    def __call__(self, name: str) -> None:
        """A mark: two appends and a reading, 0.1 µs."""
        self._times.append(perf_counter_ns())
        self._names.append(name)

    def replayed(self, names: Sequence[str], times: Sequence[int]) -> None:
        """See `ReplayClock`."""
        self._names += names
        self._times += times


class EventClock(RunClock):
    """For a GPU, which works behind the host: an event for each mark, and one wait at the end.

    An event is what `torch.cuda.Event` is: `record()` notes when all that was started so far is
    done, `elapsed_time(later)` gives milliseconds. Events are made once and recorded again in each
    run. A moment in which the device waits for the host is in the part that it waits for.
    """

    def __init__(self, event: Callable[[], Any], wait: Callable[[], None]) -> None:
        super().__init__()
        self._event = event
        self._wait = wait
        self._pool: list[Any] = []

    def start(self) -> None:
        """The run begins, or a mark: an event is recorded, without waiting for it."""
        at = len(self._times)
        if at == len(self._pool):
            self._pool.append(self._event())
        self._pool[at].record()
        super().start()

    def stop(self) -> None:
        """The run is over: waits for the device, the one synchronization of a run."""
        super().stop()
        self._wait()

    def marks(self) -> Marks:
        """See `RunClock`; the seconds are the device's."""
        pairs = pairwise(self._pool[: len(self._times)])
        seconds = array("d", (first.elapsed_time(then) / 1e3 for first, then in pairs))
        return replace(super().marks(), seconds=seconds)


def clock_for(device: torch.device) -> RunClock:
    """A clock by the events of that device, or by the host's time where the host computes."""
    if device.type == "cpu":
        return HostClock()
    kind = torch.cuda.Event if device.type == "cuda" else torch.mps.event.Event
    return EventClock(lambda: kind(enable_timing=True), lambda: wait_for(device))


# Attributes such as `shape` start no operation.
_LOOKED_UP = frozenset({"__get__", "__len__", "data_ptr", "dim", "numel", "size", "stride"})


class OperationCount(RunClock, TorchFunctionMode):
    """Counts while it is entered: its marks have numbers of operations in the place of seconds.

    Every call of PyTorch from Python counts as one, views too: starting a call costs the same
    with or without work to do, and what it starts inside itself is in the cost of one. (A
    mode of PyTorch's dispatcher would import 65 MiB of its compiler.)
    """

    _per_s = 1

    def __init__(self) -> None:
        RunClock.__init__(self)
        TorchFunctionMode.__init__(self)
        self._count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._count += getattr(func, "__name__", "") not in _LOOKED_UP
        return func(*args, **(kwargs or {}))

    def replayed(self, names: Sequence[str], times: Sequence[int]) -> None:
        """See `ReplayClock`: they are started all at once, by the call before the first."""
        for name in names:
            self(name)

    def _now(self) -> int:
        return self._count
