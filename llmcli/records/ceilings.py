"""What a machine can do at most, as measured on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class ReadRate:
    """How fast `nbytes` that are read over and over arrive: bytes per second.

    `level`: where they lie while that is done, `L2`, `L3` … or `memory`.
    """

    nbytes: int
    bytes_per_s: float
    level: str


@dataclass(frozen=True, kw_only=True)
class MatrixRate:
    """FLOPs per second of a large product in that dtype; `way` says how it was computed."""

    dtype: str
    flops_per_s: float
    way: str = ""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured on one device with the threads of the run; `seconds` is what measuring took.

    `caches`: (level, bytes) of those that the threads share or have together, smallest first.
    `reads` go from the smallest working set to the largest, which is memory where there was room
    for so much. `start_s`: starting an operation with nothing to do, median; 0 where it
    was not measured.
    """

    device: str
    threads: int
    reads: tuple[ReadRate, ...]
    matrices: tuple[MatrixRate, ...]
    caches: tuple[tuple[str, int], ...]
    seconds: float
    start_s: float = 0.0

    def read(self, nbytes: int) -> ReadRate:
        """The rate for a working set of that size: of the smallest measured one that holds it.

        Of a larger one than all of them it is the rate of the largest; where that was in a cache
        and this is not, the level says `memory, not measured`, and the rate is more than it can be.
        """
        held = next((rate for rate in self.reads if nbytes <= rate.nbytes), None)
        if held is not None:
            return held
        last, level = self.reads[-1], self._level(nbytes)
        return last if last.level == level else replace(last, level=f"{level}, not measured")

    def matrix(self, dtype: str) -> MatrixRate | None:
        """The rate of products in that dtype, None where it was not measured."""
        return next((rate for rate in self.matrices if rate.dtype == dtype), None)

    def _level(self, nbytes: int) -> str:
        """Where so many bytes lie."""
        return next((name for name, size in self.caches if nbytes <= size), MEMORY)
