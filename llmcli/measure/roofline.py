"""Lower bounds of the time in which a machine can do some work, part by part.

A roofline (Williams, Waterman & Patterson 2009) with the ceilings of the machine at hand. What a
step streams (weights and cached keys and values) comes from where all of it fits: from memory, or
from the cache that holds the whole working set. Activations are made by one part and read by the
next, and come from the cache that holds those of one part. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.work import Works
from llmcli.records.machine import Ceilings
from llmcli.records.work import PartWork

COMPUTE = "compute"


@dataclass(frozen=True, kw_only=True)
class TimeLowerBound:
    """Seconds in which a part's bytes arrive at best, and in which it is computed at best.

    `level` is where most of the time of the bytes is spent: `memory`, or a cache.
    """

    moving: float
    computing: float
    level: str

    @property
    def seconds(self) -> float:
        """Bytes arrive while others are computed with: the longer of both."""
        return max(self.moving, self.computing)

    @property
    def nearest(self) -> str:
        """The ceiling that this is: `compute`, or the level."""
        return self.level if self.moving >= self.computing else COMPUTE


def time_lower_bound(
    work: PartWork, calls: int, ceilings: Ceilings, *, numbers: Arithmetic, working_set: int
) -> TimeLowerBound:
    """The lower bound of one part that is computed `calls` times, in `numbers`.

    `working_set`: bytes that a whole step streams, weights and cache. Products with weights may
    have another rate than those of attention; where it was not measured, computing takes no time.
    """
    streamed = ceilings.read(working_set)
    own = ceilings.read(work.activations // max(1, calls))
    weighted = work.gemv or work.gemm
    matrix = ceilings.matrix(numbers.products if weighted else numbers.dtype)
    streaming = (work.weights + work.cache) / streamed.bytes_per_s
    passing = work.activations / own.bytes_per_s
    return TimeLowerBound(
        moving=streaming + passing,
        computing=0.0 if matrix is None else work.flops / matrix.flops_per_s,
        level=streamed.level if streaming >= passing else own.level,
    )


def lower_bound_seconds(
    works: Works, calls: int, ceilings: Ceilings, *, numbers: Arithmetic, working_set: int
) -> float | None:
    """Seconds of all parts one after the other: `works` is the sum over `calls` forward calls.

    None where the rate of such products was not measured.
    """
    if None in (ceilings.matrix(numbers.products), ceilings.matrix(numbers.dtype)):
        return None
    return sum(
        time_lower_bound(work, calls, ceilings, numbers=numbers, working_set=working_set).seconds
        for *_, work in works
    )
