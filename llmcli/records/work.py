"""Work: its progress, the stages of loading, FLOPs and bytes of a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from llmcli.records.document import derived

# (description, done, total or None if unknown)
Progress = Callable[[str, int, int | None], None]


def no_progress(_description: str, _done: int, _total: int | None) -> None:
    """Report nothing."""


class LoadTimings:
    """Seconds and bytes of the stages of loading, in order of their start.

    `with stages("read", nbytes): …` adds to a stage. Stages are not nested.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Time the context, also if it raises."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - begin, nbytes)

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        """Add time measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if nbytes:
            self.nbytes[name] = self.nbytes.get(name, 0) + nbytes


@dataclass(frozen=True, kw_only=True)
class Cost:
    """FLOPs and bytes of a part for some calls.

    `flops` counts matrix products, 2 per multiply-add, for unmasked query-key pairs; `flops_full`
    counts the full `T × S` rectangle, as other tools do. Neither depends on the kernel. `weights`:
    bytes of parameters read (for a lookup table, the rows); `cache`: keys and values read;
    `activations`: all other reads and writes, new cache entries included. `gemv` and `gemm` count
    products with a weight matrix, one per kernel call: a GEMV has a single row.
    """

    flops: int = 0
    flops_full: int = 0
    weights: int = 0
    cache: int = 0
    activations: int = 0
    gemv: int = 0
    gemm: int = 0

    @derived
    def bytes(self) -> int:
        """Bytes read and written in total."""
        return self.weights + self.cache + self.activations

    def __add__(self, other: Cost) -> Cost:
        theirs = vars(other)
        return Cost(**{name: value + theirs[name] for name, value in vars(self).items()})
