"""What a part waits for: memory or a cache, arithmetic, or the next call.

A roofline (Williams, Waterman & Patterson 2009) with the ceilings of the machine at hand. What a
step streams (weights and cached keys and values) comes from where all of it fits: from memory, or
from the cache that holds the whole working set. Activations are made by one part and read by the
next, and come from the cache that holds those of one part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmcli.reports.ceilings import Ceilings
from llmcli.reports.timing import PartTime

_TWICE = 2.0  # beyond so many times the least time, the ceiling is not what it waits for …
# … but the start of its operations, where that can take so long: some operations, a few µs each
# in PyTorch, with Python between them; a GPU has only its own latency
_STARTING_S, _STARTING_APART_S = 100e-6, 10e-6
_NOTHING = 0.05  # of that: where so little is to be done, it is starting whatever the time is
_LAUNCHING = 0.9  # of the device's time in which the host was still starting it


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The ceilings for one run: `working_set` bytes are streamed in a step, computed in `dtype`.

    `apart`: the device works behind the host, so that the host's time is one of its own.
    """

    ceilings: Ceilings
    dtype: str
    working_set: int
    apart: bool

    def bounded(self, part: PartTime) -> PartTime:
        """The same with `bound` and `of_bound`, where it does counted work in some time."""
        moving, level = self._moving(part)
        rate = self.ceilings.matrix(self.dtype)
        computing = part.work.flops / rate.flops_per_s if rate is not None else 0.0
        least = max(moving, computing)
        if least == 0 or part.seconds <= 0:
            return part
        bound = level if moving >= computing else "compute"
        if self._is_starting(part, least):
            bound = "calls"
        return replace(part, bound=bound, of_bound=least / part.seconds)

    def _is_starting(self, part: PartTime, least: float) -> bool:
        """Whether starting its operations is what takes the time: little time, or nothing to do.

        A large part that takes long and is far from its ceiling is computed badly, and keeps it.
        """
        if self.apart and part.host_s >= _LAUNCHING * part.seconds:
            return True
        starting = part.calls * (_STARTING_APART_S if self.apart else _STARTING_S)
        little = part.seconds - least <= starting or least <= _NOTHING * starting
        return part.seconds > _TWICE * least and little

    def _moving(self, part: PartTime) -> tuple[float, str]:
        """Seconds in which its bytes arrive at best, and where most of that time is spent."""
        streamed = self.ceilings.read(self.working_set)
        own = self.ceilings.read(part.work.activations // max(1, part.calls))
        streaming = (part.work.weights + part.work.cache) / streamed.bytes_per_s
        passing = part.work.activations / own.bytes_per_s
        level = streamed.level if streaming >= passing else own.level
        return streaming + passing, level
