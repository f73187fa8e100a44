"""The machine that a result was measured with: its load, and its measured ceilings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmcli.records.document import derived
from llmcli.records.numbers import counted

MEMORY = "memory"
# PyTorch's options on CUDA devices (`devices.resolve_device`). cuDNN makes a plan for each shape,
# so for each length of a text; others round inputs of float32 products, and sums of 16-bit ones.
CUDA_OPTIONS = {"cuDNN attention": False, "CUDA TF32": False, "CUDA 16-bit reductions": False}
_LEAST = 0.2  # processors: an idle system with its clock ticks of 10 ms stays below


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and the software that a result was measured with.

    Sizes in bytes. `cores`: logical processors available to this process. Fields that need PyTorch
    are None if it was not imported (`threads`, `cuda`). `kernels`: what computed the result;
    `kernel_level`: the level of the C kernels on this processor, `off`, or why there are none.
    `triton`: the groups of Triton's kernels for CUDA devices and whether this process has checked
    them, `off`, or why there are none.
    """

    llmcli: str
    python: str
    platform: str
    processor: str
    cores: int
    features: tuple[str, ...]
    memory_bytes: int | None
    gpus: tuple[str, ...]
    driver: str | None
    torch: str | None
    cuda: str | None = None
    threads: int | None = None
    kernels: tuple[str, ...] = ()
    kernel_level: str
    triton: str


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
        of = counted(self.processors, "processor")
        if self.others is None:
            taken = f"the load average was {self.load_average:.2f} on {of} before measuring"
        else:
            taken = f"other programs took {self.others:.2f} of {of}"
            if (self.stolen or 0.0) >= 0.05:
                taken += f" and the virtual machine's host {self.stolen:.2f}"
        return f"{taken}: on an idle machine this is faster"


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
    was enough. `matrices`: first of products with weights. `start_s`: median overhead of starting
    an empty operation in `dtype`, that of the run's activations; 0 if not measured.
    """

    device: str
    dtype: str
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
