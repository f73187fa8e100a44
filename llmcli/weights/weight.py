"""The interface of a parameter, independent of its storage format.

Axes: M rows of the input, K columns of it, N outputs. A matrix is stored `[N, K]`, one row per
output: `Y = X Wᵀ + b`. The matrices of E experts are one weight, `[E, N, K]`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from llmcli.ops.linear import linear, linear_fp32_out
from llmcli.ops.product import product_float32
from llmcli.weights.routes import ExpertAssignment

# of rows, a dense matrix `[N, K]` and a bias
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Weight(ABC):
    """A parameter with its format; callers do not depend on its memory layout.

    Vectors (a norm's weight, a bias) are weights too, without products and lookups.

    `format`: a dtype (`bfloat16`) or a block format (`Q4_K`). `shape`: as stored, `[N, K]` of a
    matrix, `[E, N, K]` of experts', `[N]` of a vector. `in_file`: its numbers stay in a mapped
    file.
    """

    format: str
    shape: tuple[int, ...]
    in_file = False

    @property
    def nbytes(self) -> int:
        """Bytes in memory, or of mapped rows; of its own rows if several weights share a tensor."""
        return sum(tensor.nbytes for tensor in self.memory())

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @abstractmethod
    def memory(self) -> list[Tensor]:
        """The tensors with its data in any layout; for comparison, not for reading."""

    def matmul(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """`X Wᵀ + b`, `[…, K]` → `[…, N]` in the dtype of `x`: for the input of a next product."""
        return self._multiply(x, bias_N, linear)

    def matmul_fp32_out(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """`X Wᵀ + b` in at least float32, by the fastest product.

        For results that are added to the residual stream or normalized; sums may have been rounded
        to the dtype of `x` (`ops.linear.rounds_sums`).
        """
        return self._multiply(x, bias_N, linear_fp32_out)

    def matmul_float32(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """`X Wᵀ + b` in at least float32 with unrounded sums, for logits."""
        return self._multiply(x, bias_N, product_float32)

    def matmul_routed(
        self, x: Tensor, routes: ExpertAssignment, bias_EN: Tensor | None = None, wide: bool = False
    ) -> Tensor:
        """Rows of (token, expert) pairs times their experts' matrices, plus biases: `[P, N]`.

        In the dtype of `x`; with `wide` like `matmul_fp32_out`. Additional memory is bounded by as
        many matrices as a token chooses. Raises TypeError for a weight without experts.
        """
        if len(self.shape) != 3:
            raise TypeError(f"a weight in {self.format} of shape {self.shape} has no experts")
        return self._multiply_routed(x, routes, bias_EN, wide)

    @abstractmethod
    def _multiply(self, x: Tensor, bias_N: Tensor | None, product: Product) -> Tensor:
        """`X Wᵀ + b` as by `product` of a dense matrix: of `ops`, to which other formats map it."""

    @abstractmethod
    def _multiply_routed(
        self, x_MK: Tensor, routes: ExpertAssignment, bias_EN: Tensor | None, wide: bool
    ) -> Tensor:
        """See `matmul_routed`; the shape is `[E, N, K]`."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids`, `[…]` → `[…, K]` in at least float32: an embedding.

        `ids` are on the weight's device.
        """

    @abstractmethod
    def dense(self, dtype: torch.dtype | None = None, *, rows: slice = slice(None)) -> Tensor:
        """The numbers, or those of some rows, as a read-only tensor in the stored shape.

        Without a `dtype` in the weight's; for a dense weight this is a view.
        """

    @abstractmethod
    def quantized_input(self, x: Tensor) -> Tensor:
        """The activations `[…, K]` as rounded by the products."""


class BlockQuantized(Weight):
    """A matrix that keeps the blocks of a GGUF file, in any layout."""

    @abstractmethod
    def write(self, rows: Tensor, raw: Tensor) -> None:
        """Those rows, int64 `[n]`, from blocks as a file has them, uint8 `[n, bytes]`."""
