"""Measured performance ceilings of a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Bytes of a level (`L2`, `L3` …) that the threads have together."""

    level: str
    bytes: int


def level_of(nbytes: int, caches: tuple[Cache, ...]) -> str:
    """The level that holds `nbytes`: the first of the caches that is large enough, or memory."""
    return next((cache.level for cache in caches if nbytes <= cache.bytes), MEMORY)


@dataclass(frozen=True, kw_only=True)
class ReadRate:
    """Bandwidth of repeatedly reading `nbytes`, in bytes per second.

    `level`: the level that holds them: `L2`, `L3` … or `memory`.
    """

    nbytes: int
    bytes_per_s: float
    level: str


@dataclass(frozen=True, kw_only=True)
class MatrixRate:
    """FLOPs per second of a large product in `dtype`; `way`: how it was computed."""

    dtype: str
    flops_per_s: float
    way: str = ""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Ceilings of one device with the threads of the run; `seconds`: measuring time.

    `caches`: smallest first. `reads` are by ascending working set; the largest is memory if there
    was enough. `start_s`: median overhead of starting an empty operation; 0 if not measured.
    """

    device: str
    threads: int
    reads: tuple[ReadRate, ...]
    matrices: tuple[MatrixRate, ...]
    caches: tuple[Cache, ...]
    seconds: float
    start_s: float = 0.0

    def read(self, nbytes: int) -> ReadRate:
        """The rate of the smallest measured working set that is not smaller than `nbytes`.

        For a larger size the rate of the largest one; if that was in a cache and `nbytes` is not,
        the level is `memory, not measured`, and the rate is too high.
        """
        held = next((rate for rate in self.reads if nbytes <= rate.nbytes), None)
        if held is not None:
            return held
        last, level = self.reads[-1], level_of(nbytes, self.caches)
        return last if last.level == level else replace(last, level=f"{level}, not measured")

    def matrix(self, dtype: str) -> MatrixRate | None:
        """The rate of products in `dtype`; None if not measured."""
        return next((rate for rate in self.matrices if rate.dtype == dtype), None)
