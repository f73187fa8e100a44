"""Memory of a part during prefill: the circumstances, and the needs of products.

Numbers are bytes. Measured on x86 with PyTorch 2.13 (`tests/benchmarks/memory_estimate.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from llmcli.graph.blocks import ACTIVATION_BYTES, DEEP, RUN

# Processors with AMX have 2 MiB of L2 cache per core; oneDNN fills three quarters.
_PACKED = 3 << 19


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The last chunk of a prompt: `tokens` per sequence, with `keys` in its cache.

    `size`: bytes of a number; `kept`: of one in the cache. `digits`: number of 8-bit digits to
    which products round their inputs (0: none), with `pairs` some to bfloat16. `cuda`: on a GPU.
    `native`: the processor has 16-bit multiplications. `portable`: see `Arithmetic`.
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
        """Rows of a product with a weight."""
        return self.batch * self.tokens

    @property
    def wide(self) -> int:
        """Bytes of a number in at least float32."""
        return max(self.size, 4)

    @property
    def packed(self) -> bool:
        """Whether 16-bit products copy their inputs into another layout."""
        return self.size < 4 and self.native and not self.cuda

    @property
    def both(self) -> int:
        """Bytes of a 16-bit result that is also kept in float32."""
        return self.size if self.size >= 4 else self.size + 4

    def widened(self, columns: int) -> int:
        """Bytes for a 16-bit product of the stream on a CPU without 16-bit instructions."""
        emulated = self.size < 4 and not (self.cuda or self.native)
        return 4 * columns * (self.width + self.rows) if emulated else 0

    def product(self, inputs: int, columns: int) -> int:
        """Maximum bytes of a kernel for `[rows, inputs] · [inputs, columns]`, one thread.

        For packed weights: the rounded inputs. For 16 bits, oneDNN's AMX kernels copy the weights
        into blocks of 32 inputs, as many as fit the cache, and keep the sums in float32 if not all
        inputs fit; its AVX512-BF16 kernels take less (oneDNN 3.12,
        `matmul/amx_blocking_heuristics.cpp`).
        """
        if self.digits:
            copied = self.rows * inputs // RUN * ACTIVATION_BYTES[self.digits]
            return max(copied, 2 * self.rows * -(-inputs // DEEP) * DEEP if self.pairs else 0)
        if not self.packed:
            return 0
        weights = min(2 * columns * (-(-inputs // 32) * 32), _PACKED)
        sums = 4 * self.rows * min(columns, 1024) if inputs >= 2048 else 0
        return weights + sums + (128 << 10)  # the last: tiles and padding


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Peak bytes of a part, and bytes `shared` between layers, by kind."""

    peak: int
    shared: Mapping[Hashable, int] = field(default_factory=dict)
