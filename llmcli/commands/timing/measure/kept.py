"""Of many watched runs the median one, without keeping the marks of all of them."""

from __future__ import annotations

from array import array
from bisect import insort
from dataclasses import dataclass

from llmcli.commands.timing.measure.clock import Marks

MOST = 128  # runs whose marks are kept: 61 KB each for 16 tokens of a model of 30 layers


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A run with a clock: its wall time, measured around it, and its marks."""

    wall_s: float
    marks: Marks


class Kept:
    """Those of `runs` watched runs that may be the median (the lower one of two) when all are made.

    Where that is more than `MOST` every other one in order of time goes, so that one near the
    median, whatever it will be, is still there.
    """

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._walls: array[float] = array("d")  # of all runs, in order of time
        self._kept: list[Watched] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, run: Watched) -> None:
        """One more; those that cannot be the median any more are given up."""
        insort(self._walls, run.wall_s)
        insort(self._kept, run, key=lambda kept: kept.wall_s)
        done, middle = len(self._walls), (self._runs - 1) // 2
        low = self._walls[max(0, middle - (self._runs - done))]
        high = self._walls[min(middle, done - 1)]
        inside = [kept for kept in self._kept if low <= kept.wall_s <= high]
        self._kept = inside or [self.median]
        if len(self._kept) > MOST:
            self._kept = self._kept[::2]

    @property
    def median(self) -> Watched:
        """Of those that were added the one in the middle, or the nearest to it that was kept."""
        middle = self._walls[(len(self._walls) - 1) // 2]
        return min(self._kept, key=lambda kept: abs(kept.wall_s - middle))
