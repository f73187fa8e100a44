"""From clocks that the decoder calls as it goes to the time of each part in each layer."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from time import perf_counter_ns
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from llmcli.commands.timing.report import CALLS, GAPS, KERNEL, PartTime, Piece
from llmcli.devices import wait_for
from llmcli.graph.cost import CostByPart
from llmcli.graph.graph import Graph, Place
from llmcli.measure.ceilings import Roofline
from llmcli.records.work import Cost

END = "end"  # what the last mark of a run is called
STEP = "step"  # the first mark of a forward call
SAMPLE = "sample"  # the mark of a token that is chosen
_NEAR = 0.5  # of a ceiling: from there on it is what limits the part
_EXPLAINED = 0.5  # of the time beyond the lower bound that starting operations takes
_LAUNCHING = 0.9  # of the device's time in which the host was still starting it
MOST = 128  # runs whose marks are kept: 61 KB each for 16 tokens of a model of 30 layers
# Attributes such as `shape` start no operation.
_LOOKED_UP = frozenset({"__get__", "__len__", "data_ptr", "dim", "numel", "size", "stride"})


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The marks of one run: `names[i]` came `seconds[i]` after the mark before it.

    The first counts from the beginning of the run, the last is `end`. `seconds` are the device's,
    `host_s` what passed on the host meanwhile: the same where the host computes. `wall_s`: the
    time of the run, measured around it.
    """

    names: tuple[str, ...]
    seconds: array[float]
    host_s: array[float]
    wall_s: float = 0.0

    def scaled(self, factor: float) -> Marks:
        """The marks of a run that takes `factor` times as long."""
        seconds, host_s = (
            array("d", (factor * one for one in each)) for each in (self.seconds, self.host_s)
        )
        return replace(self, seconds=seconds, host_s=host_s, wall_s=factor * self.wall_s)


class RunClock:
    """A clock for one run after another: the host's time when each mark was made."""

    _per_s = 1e9

    def __init__(self) -> None:
        self._names: list[str] = []
        self._times: list[int] = []

    def start(self) -> None:
        """The run begins now."""
        self._times.append(perf_counter_ns())

    def __call__(self, name: str) -> None:
        """Mark an activation as computed (on a GPU: as started)."""
        self.start()
        self._names.append(name)

    def stop(self) -> None:
        """The run is over."""
        self(END)

    def marks(self, wall_s: float = 0.0) -> Marks:
        """Return the marks after `stop` and forget them, since freeing them in a run takes time.

        Each name is one string however often it was marked: those of many runs are kept.
        """
        names = tuple(map(sys.intern, self._names))
        seconds = array("d", ((b - a) / self._per_s for a, b in pairwise(self._times)))
        self._names, self._times = [], []
        return Marks(names=names, seconds=seconds, host_s=seconds, wall_s=wall_s)


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

    def marks(self, wall_s: float = 0.0) -> Marks:
        """See `RunClock`; the seconds are the device's."""
        pairs = pairwise(self._pool[: len(self._times)])
        seconds = array("d", (first.elapsed_time(then) / 1e3 for first, then in pairs))
        return replace(super().marks(wall_s), seconds=seconds)


def clock_for(device: torch.device) -> RunClock:
    """A clock by the events of that device, or by the host's time where the host computes."""
    if device.type == "cpu":
        return HostClock()
    kind = torch.cuda.Event if device.type == "cuda" else torch.mps.event.Event
    return EventClock(lambda: kind(enable_timing=True), lambda: wait_for(device))


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

    def start(self) -> None:
        """The run begins, or a mark."""
        self._times.append(self._count)

    def replayed(self, names: Sequence[str], times: Sequence[int]) -> None:
        """See `ReplayClock`: they are started all at once, by the call before the first."""
        for name in names:
            self(name)


class Kept:
    """Finds the median of many instrumented runs without keeping the marks of all of them.

    Of more than `MOST` it drops the one whose neighbours are nearest to each other in the order of
    all times, so that one near the final median is always kept.
    """

    def __init__(self) -> None:
        self._walls: array[float] = array("d")  # of all runs, in order of time
        self._kept: list[Marks] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, run: Marks) -> None:
        """Add a run."""
        insort(self._walls, run.wall_s)
        insort(self._kept, run, key=lambda kept: kept.wall_s)
        if len(self._kept) > MOST:
            places = [bisect_left(self._walls, kept.wall_s) for kept in self._kept]
            apart = [after - before for before, after in zip(places, places[2:], strict=False)]
            del self._kept[1 + apart.index(min(apart))]

    @property
    def median(self) -> Marks:
        """The one in the middle (the lower one of two), or the nearest to it that was kept."""
        middle = self._walls[(len(self._walls) - 1) // 2]
        return min(self._kept, key=lambda kept: abs(kept.wall_s - middle))


def place(name: str, model: Graph) -> Place:
    """The part and layer that the time up to a mark belongs to; a gap has no layer."""
    if name == SAMPLE:
        return SAMPLE, None
    if name not in model:  # `step`, `end`, and unknown names: a check counts those
        return GAPS, None
    part, layer = model.place(name)
    return part, None if part == GAPS else layer


def pieces(marks: Marks, model: Graph) -> Iterator[Piece]:
    """The pieces of a run, one after the other: each begins where the one before it ends."""

    def placed() -> Iterator[tuple[tuple[Place, int], float, float]]:
        call, before = -1, ""
        for name, seconds, host_s in zip(marks.names, marks.seconds, marks.host_s, strict=True):
            call += name == SAMPLE or (name == STEP and before != SAMPLE)
            before = name
            yield (place(name, model), call), seconds, host_s

    begin = 0.0
    for ((part, layer), call), group in groupby(placed(), key=lambda mark: mark[0]):
        _, each, host = zip(*group, strict=True)
        seconds = sum(each)
        yield Piece(
            part=part, layer=layer, call=call, begin=begin, seconds=seconds, host_s=sum(host)
        )
        begin += seconds


def in_order(model: Graph) -> tuple[str, ...]:
    """Every part that may be timed, as they are shown: the groups, the choice of a token, gaps."""
    return (*model.groups, SAMPLE, GAPS)


def part_times(
    run: Sequence[Piece], works: CostByPart, operations: Mapping[Place, int], order: Sequence[str]
) -> tuple[PartTime, ...]:
    """Each (part, layer) that was timed: in the order of `works`, then those without, in `order`.

    Work that was never timed is left out, and so is a part without a moment.
    """
    timed: dict[Place, list[Piece]] = {}
    for piece in run:
        timed.setdefault(piece.place, []).append(piece)
    ordered = sorted(timed, key=lambda place: order.index(place[0]))
    return tuple(
        PartTime(
            part=where[0],
            layer=where[1],
            seconds=sum(piece.seconds for piece in timed[where]),
            host_s=sum(piece.host_s for piece in timed[where]),
            calls=len(timed[where]),
            operations=operations.get(where, 0),
            work=works.get(where, Cost()),
        )
        for where in dict.fromkeys([*works, *ordered])
        if where in timed
    )


def over_layers(parts: Sequence[PartTime], order: Sequence[str]) -> tuple[PartTime, ...]:
    """Each part over all layers, in that order."""
    own = {name: [part for part in parts if part.part == name] for name in order}
    return tuple(PartTime.total(name, found) for name, found in own.items() if found)


def judged(
    part: PartTime, wall_s: float, roof: Roofline | None, captured: bool = False
) -> PartTime:
    """The part with its share of the wall time, and with its bound where it does counted work.

    The bound is a ceiling only where that is near, and `calls` only where starting takes long: on
    a GPU, which works behind the host, that is also where the host took as long. Operations of a
    `captured` step are not started one by one. `roof`: None where no ceilings were measured.
    """
    part = replace(part, share=part.seconds / wall_s if wall_s > 0 else None)
    if roof is None:
        return part
    least, nearest = roof.of(part.work, part.calls)
    if least == 0 or part.seconds <= 0:
        return part
    starting = part.operations * roof.ceilings.start_s
    explained = not captured and starting >= _EXPLAINED * (part.seconds - least)
    gpu = roof.ceilings.device != "cpu" and not captured
    behind = gpu and part.host_s >= _LAUNCHING * part.seconds
    bound = CALLS if behind or explained else KERNEL
    if least >= _NEAR * part.seconds and not behind:
        bound = nearest
    return replace(part, bound=bound, nearest=nearest, of_bound=least / part.seconds)
