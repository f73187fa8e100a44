"""What a part waits for: memory or a cache, arithmetic, its operations' start, or their code."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.commands.timing.report import PartTime
from llmcli.observe.roofline import Least, least
from llmcli.reports.ceilings import Ceilings

CALLS, KERNEL = "calls", "kernel"
_NEAR = 0.5  # of a ceiling: from there on it is what the part waits for
_EXPLAINED = 0.5  # of the time beyond the least: so much of it, and it is the starting
_LAUNCHING = 0.9  # of the device's time in which the host was still starting it


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The ceilings for one run in `numbers`, of which a step streams `working_set` bytes.

    `apart`: the device works behind the host, so that the host's time is one of its own.
    """

    ceilings: Ceilings
    numbers: Arithmetic
    working_set: int
    apart: bool

    def bounded(self, part: PartTime) -> PartTime:
        """The same with its bound, where it does counted work in some time."""
        found = least(
            part.work, part.calls, self.ceilings, numbers=self.numbers,
            working_set=self.working_set,
        )  # fmt: skip
        if found.seconds == 0 or part.seconds <= 0:
            return part
        return replace(
            part,
            bound=self._bound(part, found),
            nearest=found.nearest,
            of_bound=found.seconds / part.seconds,
        )

    def _bound(self, part: PartTime, found: Least) -> str:
        """A ceiling only where it is near; the start of operations only where it takes so long."""
        if self.apart and part.host_s >= _LAUNCHING * part.seconds:
            return CALLS
        if found.seconds >= _NEAR * part.seconds:
            return found.nearest
        starting = part.operations * self.ceilings.start_s
        explained = starting >= _EXPLAINED * (part.seconds - found.seconds)
        return CALLS if explained else KERNEL
