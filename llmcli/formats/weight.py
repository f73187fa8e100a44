"""What is done with a parameter, whatever format its numbers are kept in.

Axes: M rows of the input, K columns of it, N outputs. A matrix is stored `[N, K]`, a row per
output: `Y = X Wᵀ + b`. The matrices of E experts are one weight, `[E, N, K]`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from llmcli.formats.routes import Routes


class Weight(ABC):
    """A parameter that owns its format: callers do not depend on its layout in memory.

    A vector (a norm's weight, a bias) is one, too: it has no products and no rows to look up.
    """

    in_file = False  # whether its numbers stay in a mapped file, whose pages come and go

    @property
    @abstractmethod
    def format(self) -> str:
        """What its numbers are kept in: a dtype's name (`bfloat16`), or a block format's."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """As it is stored: `[N, K]` of a matrix, `[E, N, K]` of experts', `[N]` of a vector."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in memory, of its own rows where several weights lie in one tensor."""

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @abstractmethod
    def memory(self) -> list[Tensor]:
        """The tensors in which its numbers lie, in whatever layout; to be compared, not read."""

    @abstractmethod
    def matmul(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """`X Wᵀ + b`, `[…, K]` → `[…, N]` in the dtype of `x`: for the input of a next product."""

    @abstractmethod
    def matmul_wide(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """The same in at least float32, by the fastest product there is.

        For what is added to the residual stream or normalized; the sums may have been rounded to
        the dtype of `x` (`ops.linear.rounds_sums`).
        """

    @abstractmethod
    def matmul_float32(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """The same in at least float32, with sums that are never rounded to less: for logits."""

    def matmul_routed(
        self, x_MK: Tensor, routes: Routes, bias_EN: Tensor | None = None, *, wide: bool = False
    ) -> Tensor:
        """The rows of pairs of a token and an expert, each times its expert's matrix: `[P, N]`.

        Plus its expert's bias. In the dtype of `x`; `wide` as `matmul_wide`. Memory beside the
        result is that of so many matrices as a token chooses experts, however many there are.
        Raises TypeError for a weight without experts.
        """
        raise TypeError(f"a weight in {self.format} of shape {self.shape} has no experts")

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """The rows of those numbers, `[…]` → `[…, K]` in at least float32: an embedding.

        `ids` are on the device of the weight.
        """

    @abstractmethod
    def dense(self, dtype: torch.dtype | None = None, *, rows: slice = slice(None)) -> Tensor:
        """Its numbers, or those of some rows, as a tensor of the stored shape; to be read only.

        Without a `dtype` in the one they are kept in; of a dense weight that is a view, no copy.
        """

    @abstractmethod
    def seen(self, x: Tensor) -> Tensor:
        """The activations `[…, K]` as the products above read them, rounded as they round them."""


class InBlocks(Weight):
    """A matrix that keeps the blocks of a GGUF file, in whatever order they lie."""

    @abstractmethod
    def write(self, rows: Tensor, raw: Tensor) -> None:
        """Those rows, int64 `[n]`, from blocks as a file has them, uint8 `[n, bytes]`."""
