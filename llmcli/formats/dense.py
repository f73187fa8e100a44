"""Weights in a PyTorch dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.formats.routes import Routes
from llmcli.formats.weight import Weight
from llmcli.ops import compiled
from llmcli.ops.linear import each_own, in_lots, lies_by_columns, linear, linear_wide
from llmcli.ops.norm import at_least_float32
from llmcli.ops.product import has_kernel, product_float32, product_pairs, routed_by_kernel


class Dense(Weight):
    """A weight in a tensor; matrices are stored by rows or by columns, experts' by rows.

    `tensor` has the stored shape and is written by loading; others read `dense`. `inputs`: dtype of
    the inputs, by default the weight's; 16-bit weights can have float32 inputs, which are rounded
    to bfloat16 with `pairs`, except in `matmul_float32`. `in_file`: read-only mapped memory.
    """

    def __init__(
        self,
        tensor: Tensor,
        inputs: torch.dtype | None = None,
        *,
        pairs: bool = False,
        in_file: bool = False,
    ) -> None:
        self.tensor = tensor
        self._inputs = inputs or tensor.dtype
        self._pairs = pairs
        self.in_file = in_file

    @classmethod
    def for_products(
        cls,
        rows: int,
        columns: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        inputs: torch.dtype | None = None,
        pairs: bool = False,
    ) -> Dense:
        """An uninitialized matrix, in the memory layout with the fastest products."""
        if lies_by_columns(rows, device, dtype):
            return cls(torch.empty(columns, rows, device=device, dtype=dtype).t(), inputs)
        return cls(torch.empty(rows, columns, device=device, dtype=dtype), inputs, pairs=pairs)

    def in_pairs(self) -> Dense:
        """The same weight with inputs rounded to bfloat16."""
        return Dense(self.tensor, self._inputs, pairs=True, in_file=self.in_file)

    def split(self, rows: Sequence[int], axis: int = 0) -> list[Dense]:
        """Split into views of `rows` rows each: the parameters of a fused product."""
        parts = self.tensor.split_with_sizes(list(rows), axis)
        return [
            Dense(part, self._inputs, pairs=self._pairs, in_file=self.in_file) for part in parts
        ]

    @property
    def format(self) -> str:
        """The name of the dtype."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return self.tensor.nbytes

    def memory(self) -> list[Tensor]:
        """The tensor, possibly a view."""
        return [self.tensor]

    def matmul(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """See `ops.linear.linear`, and `ops.product.product_pairs` for a weight in pairs."""
        return (product_pairs if self._pairs else linear)(x, self.tensor, bias_N)

    def matmul_wide(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """See `ops.linear.linear_wide`."""
        return (product_pairs if self._pairs else linear_wide)(x, self.tensor, bias_N)

    def matmul_float32(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """See `ops.product.product_float32`."""
        return product_float32(x, self.tensor, bias_N)

    def matmul_routed(
        self, x_MK: Tensor, routes: Routes, bias_EN: Tensor | None = None, *, wide: bool = False
    ) -> Tensor:
        """One product per expert with pairs, or per pair if shapes must be fixed.

        Few pairs with 16-bit experts use one call of our kernel, which reads their experts without
        synchronization.
        """
        if self.tensor.ndim != 3:
            return super().matmul_routed(x_MK, routes, bias_EN, wide=wide)
        few = routes.static or len(routes.expert_N) <= len(self.tensor)
        if few and compiled.runs(x_MK) and has_kernel(x_MK[:1], self.tensor[0]):
            sums_PN = routed_by_kernel(
                x_MK, self.tensor, routes.expert_N, routes.row_N, routes.each, bias_EN,
                pairs=self._pairs,
            )  # fmt: skip
            return sums_PN if wide else sums_PN.to(x_MK.dtype)
        if routes.static:
            every = torch.arange(len(routes.expert_N), device=x_MK.device)
            x_PK = x_MK[routes.rows(every)]
            return each_own(
                x_PK, self.tensor, routes.expert_N, bias_EN, at_once=routes.at_once, wide=wide
            )
        product = product_pairs if self._pairs else linear_wide if wide else linear
        out_PN: Tensor | None = None
        for expert, pairs, rows in routes.groups:
            bias_N = None if bias_EN is None else bias_EN[expert]
            y = product(x_MK[in_lots(rows, x_MK)], self.tensor[expert], bias_N)
            if out_PN is None:
                out_PN = y.new_empty(len(routes.expert_N), y.shape[-1])
            out_PN[pairs] = y[: len(pairs)] if isinstance(pairs, Tensor) else y
        assert out_PN is not None
        return out_PN

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids`, copied and widened."""
        table = self.tensor
        format = compiled.IN_16_BITS.get(table.dtype)
        if format is not None and table.is_contiguous() and compiled.runs(table):
            return compiled.look_up(table, format, table.shape[0], table.shape[1], ids)
        return at_least_float32(F.embedding(ids, self.tensor))

    def dense(self, dtype: torch.dtype | None = None, *, rows: slice = slice(None)) -> Tensor:
        """A view in the weight's dtype, a copy in any other."""
        return self.tensor[rows].to(dtype or self.tensor.dtype)

    def seen(self, x: Tensor) -> Tensor:
        """`x` in the dtype of the inputs, rounded with `pairs`."""
        return (x.bfloat16() if self._pairs else x).to(self._inputs)


def writable(weight: Weight) -> Tensor:
    """The writable tensor of a dense weight. Raises TypeError for other kinds."""
    if not isinstance(weight, Dense) or weight.in_file:
        raise TypeError(f"a weight in {weight.format} is not filled number by number")
    return weight.tensor
