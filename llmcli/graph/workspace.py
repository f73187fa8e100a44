"""What a part holds in memory while a prompt is read: the circumstances, and what products take.

Numbers are bytes. Measured on x86 with PyTorch 2.13 (`tests/benchmarks/memory_estimate.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from llmcli.graph.blocks import ACTIVATION_BYTES, DEEP, RUN

# Every processor with AMX has 2 MiB of second-level cache per core; oneDNN fills three quarters.
_PACKED = 3 << 19


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The last chunk of a prompt: `tokens` of each sequence, with `keys` in its cache then.

    `size`: bytes of a number, `kept`: of one in the cache. `digits` of 8 bits: to so many products
    round their inputs (0: none), with `pairs` some to bfloat16. `cuda`: on a GPU. `native`: the
    processor multiplies numbers of 16 bits itself. `portable`: see `Arithmetic`.
    """

    width: int
    batch: int
    tokens: int
    keys: int
    size: int
    kept: int
    digits: int
    pairs: bool
    cuda: bool
    native: bool
    portable: bool

    @property
    def rows(self) -> int:
        """Of a product with a weight."""
        return self.batch * self.tokens

    @property
    def wide(self) -> int:
        """Bytes of a number that has at least float32."""
        return max(self.size, 4)

    @property
    def packed(self) -> bool:
        """Whether products of 16 bits copy what they multiply into an order of their own."""
        return self.size < 4 and self.native and not self.cuda

    @property
    def both(self) -> int:
        """A number that a product gave in 16 bits and that is widened: it is there twice."""
        return self.size if self.size >= 4 else self.size + 4

    def widened(self, columns: int) -> int:
        """What a product of the stream in 16 bits takes on a CPU without such instructions."""
        emulated = self.size < 4 and not (self.cuda or self.native)
        return 4 * columns * (self.width + self.rows) if emulated else 0

    def product(self, inputs: int, columns: int) -> int:
        """The most that a kernel takes for `[rows, inputs] · [inputs, columns]`, one thread.

        Of packed weights the rounded inputs. oneDNN, for 16 bits:

        Its AMX kernels copy the weights into blocks of 32 inputs, as many of them as fit the cache,
        and where all inputs are too many at a time they keep the sums in float32 meanwhile; its
        AVX512-BF16 kernels take less (oneDNN 3.12, `matmul/amx_blocking_heuristics.cpp`).
        """
        if self.digits:
            copied = self.rows * inputs // RUN * ACTIVATION_BYTES[self.digits]
            return max(copied, 2 * self.rows * -(-inputs // DEEP) * DEEP if self.pairs else 0)
        if not self.packed:
            return 0
        weights = min(2 * columns * (-(-inputs // 32) * 32), _PACKED)
        sums = 4 * self.rows * min(columns, 1024) if inputs >= 2048 else 0
        return weights + sums + (128 << 10)  # the last: tiles, and what pads inputs and columns


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """`peak` bytes at once at most, and what layers have in common: bytes by what it is."""

    peak: int
    shared: Mapping[Hashable, int] = field(default_factory=dict)
