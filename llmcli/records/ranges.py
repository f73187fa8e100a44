"""The numbers that a setting may have, and those of each sampling setting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

LARGEST = 2**63 - 1  # what fits torch's integers; no option means anything beyond


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts: from `low` to `high`, ends included unless `above`.

    `above`: the lower end itself is excluded. `or_else`: one number outside that is accepted, too.
    None is no bound. NaN and infinity never pass. `k`: `8k` is 8 · 1024, `1m` 1024 of these.
    """

    low: float
    high: float | None = None
    above: bool = False
    or_else: float | None = None
    k: bool = False

    def __contains__(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if abs(value) > LARGEST:
            return False
        if value == self.or_else:
            return True
        low = value > self.low if self.above else value >= self.low
        return low and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.or_else is not None:
            return f"{replace(self, or_else=None)} or {_plain(self.or_else)}"
        if self.high is None:
            return f"{'greater than' if self.above else 'at least'} {_plain(self.low)}"
        if self.above:
            return f"greater than {_plain(self.low)} and at most {_plain(self.high)}"
        return f"between {_plain(self.low)} and {_plain(self.high)}"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


SAMPLING: Mapping[str, Range] = {
    "temperature": Range(0),
    "top_k": Range(0),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, above=True),
    "presence_penalty": Range(-1e6, 1e6),
    "frequency_penalty": Range(-1e6, 1e6),
}
