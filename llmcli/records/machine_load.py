"""What other programs took of the processors while something was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmcli.records.document import derived, members

_LEAST = 0.2  # processors: an idle system with its clock ticks of 10 ms stays below


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """Of the `processors` that this process may use, over `seconds`; `threads` of it computed.

    `others` is the time of other programs and `stolen` that of the host of a virtual machine, in
    processors (1.0: one of them the whole time); None where the system does not count it.
    `load_average` is that of the minute before, None where the system has none.
    """

    seconds: float
    processors: int
    threads: int
    others: float | None
    stolen: float | None
    load_average: float | None

    @derived
    def slowed(self) -> bool:
        """Whether so much was taken that not every thread had a processor of its own."""
        taken = self.load_average if self.others is None else self.others + (self.stolen or 0.0)
        return taken is not None and taken + self.threads > self.processors + _LEAST

    def document(self) -> dict[str, Any]:
        """`machine_load` of a JSON document."""
        return members(self)

    @property
    def words(self) -> str:
        """For a note: who took how much, and what that does to the figures."""
        of = f"{self.processors} processor{'s' * (self.processors != 1)}"
        if self.others is None:
            taken = f"the load average was {self.load_average:.2f} on {of} before measuring"
        else:
            taken = f"other programs took {self.others:.2f} of {of}"
            if (self.stolen or 0.0) >= 0.05:
                taken += f" and the virtual machine's host {self.stolen:.2f}"
        return f"{taken}: on an idle machine this is faster"
