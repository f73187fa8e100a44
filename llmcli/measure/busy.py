"""How much of the processors other programs take while something is measured."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from llmcli.limits import processor_numbers, processors
from llmcli.records.machine import MachineLoad


class _Reading(NamedTuple):
    """Seconds since some time in the past: of all programs, of the host, of this process."""

    all: float | None
    stolen: float | None
    own: float
    wall: float


class CpuContention:
    """Counts from when it is made; `load` is what there was since. `root` is for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._average: float | None = None
        with suppress(OSError):
            self._average = os.getloadavg()[0]
        self._begin = _read(root)

    def load(self, threads: int) -> MachineLoad:
        """The time that other programs took since then; this one computes with `threads`."""
        begin, end = self._begin, _read(self._root)
        seconds = max(end.wall - begin.wall, 1e-9)
        others = stolen = None
        if end.all is not None and begin.all is not None:
            others = max(0.0, end.all - begin.all - (end.own - begin.own)) / seconds
        if end.stolen is not None and begin.stolen is not None:
            stolen = (end.stolen - begin.stolen) / seconds
        return MachineLoad(
            seconds=seconds,
            processors=processors(),
            threads=threads,
            others=others,
            stolen=stolen,
            load_average=self._average,
        )


def _read(root: Path) -> _Reading:
    """From the clock ticks in `/proc/stat`, of the processors that this process may use."""
    times = os.times()
    own, wall = sum(times[:4]), perf_counter()
    try:
        text = (root / "proc/stat").read_text()
    except OSError:
        return _Reading(None, None, own, wall)
    ours = set(processor_numbers())
    busy = stolen = 0
    for number, counts in re.findall(r"^cpu(\d+) (.*)$", text, re.MULTILINE):
        if int(number) in ours:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, counts.split())
            busy += user + nice + system + irq + softirq
            stolen += steal
    tick = os.sysconf("SC_CLK_TCK")
    return _Reading(busy / tick, stolen / tick, own, wall)
