"""CPU time used by other programs during a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.records.document import derived

_LEAST = 0.2  # processors: an idle system with its clock ticks of 10 ms stays below


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """Load of the `processors` available to this process over `seconds`; it used `threads`.

    `others`: other programs' time, and `stolen`: the virtual machine host's, in processors (1.0:
    one processor all the time); None if unknown. `load_average`: of the minute before, None if
    unknown.
    """

    seconds: float
    processors: int
    threads: int
    others: float | None
    stolen: float | None
    load_average: float | None

    @derived
    def slowed(self) -> bool:
        """Whether too little CPU time was left for one processor per thread."""
        taken = self.load_average if self.others is None else self.others + (self.stolen or 0.0)
        return taken is not None and taken + self.threads > self.processors + _LEAST

    @property
    def words(self) -> str:
        """A note about the load and its effect on the results."""
        of = f"{self.processors} processor{'s' * (self.processors != 1)}"
        if self.others is None:
            taken = f"the load average was {self.load_average:.2f} on {of} before measuring"
        else:
            taken = f"other programs took {self.others:.2f} of {of}"
            if (self.stolen or 0.0) >= 0.05:
                taken += f" and the virtual machine's host {self.stolen:.2f}"
        return f"{taken}: on an idle machine this is faster"
