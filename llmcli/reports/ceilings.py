"""What a machine can do at most, as measured on it."""

from __future__ import annotations

from dataclasses import dataclass


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
    `reads` go from the smallest working set to the largest, the last one being memory.
    """

    device: str
    threads: int
    reads: tuple[ReadRate, ...]
    matrices: tuple[MatrixRate, ...]
    caches: tuple[tuple[str, int], ...]
    seconds: float

    def read(self, nbytes: int) -> ReadRate:
        """The rate for a working set of that size: the smallest measured one that holds it."""
        return next((rate for rate in self.reads if nbytes <= rate.nbytes), self.reads[-1])

    def matrix(self, dtype: str) -> MatrixRate | None:
        """The rate of products in that dtype, None where it was not measured."""
        return next((rate for rate in self.matrices if rate.dtype == dtype), None)
