"""Weights in a PyTorch dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.ops import compiled, on_card
from llmcli.ops.linear import each_own, lies_by_columns, linear, linear_fp32_out
from llmcli.ops.norm import at_least_float32
from llmcli.ops.product import has_kernel, product_bf16_dot, product_float32, routed_by_kernel
from llmcli.weights.routes import ExpertAssignment
from llmcli.weights.weight import Product, Weight


class Dense(Weight):
    """A weight in a tensor; matrices are stored by rows or by columns, experts' by rows.

    `tensor` has the stored shape and is written by loading; others read `dense`. `inputs`: dtype of
    the inputs, by default the weight's; 16-bit weights can have float32 inputs, which are rounded
    to bfloat16 with `bf16_dot`, except in `matmul_float32`. `in_file`: read-only mapped memory.
    """

    def __init__(
        self,
        tensor: Tensor,
        inputs: torch.dtype | None = None,
        *,
        bf16_dot: bool = False,
        in_file: bool = False,
    ) -> None:
        self.tensor = tensor
        self.format = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        self._inputs = inputs or tensor.dtype
        self._bf16_dot = bf16_dot
        self.in_file = in_file

    @classmethod
    def for_products(
        cls,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
        *,
        inputs: torch.dtype | None = None,
        bf16_dot: bool = False,
    ) -> Dense:
        """An uninitialized matrix `[N, K]`, in the memory layout with the fastest products."""
        if lies_by_columns(shape[0], device, dtype):
            return cls(torch.empty(shape[::-1], device=device, dtype=dtype).t(), inputs)
        tensor = torch.empty(shape, device=device, dtype=dtype)
        return cls(tensor, inputs, bf16_dot=bf16_dot)

    def with_bf16_dot(self) -> Dense:
        """The same weight with inputs rounded to bfloat16."""
        return Dense(self.tensor, self._inputs, bf16_dot=True, in_file=self.in_file)

    def split(self, rows: Sequence[int], axis: int = 0) -> list[Dense]:
        """Split into views of `rows` rows each: the parameters of a fused product."""
        parts = self.tensor.split_with_sizes(list(rows), axis)
        return [
            Dense(part, self._inputs, bf16_dot=self._bf16_dot, in_file=self.in_file)
            for part in parts
        ]

    def memory(self) -> list[Tensor]:
        """The tensor, possibly a view."""
        return [self.tensor]

    def _multiply(self, x: Tensor, bias_N: Tensor | None, product: Product) -> Tensor:
        """With `bf16_dot` by `ops.product.product_bf16_dot`, except in `matmul_float32`."""
        if self._bf16_dot and product is not product_float32:
            product = product_bf16_dot
        return product(x, self.tensor, bias_N)

    def _multiply_routed(
        self, x_MK: Tensor, routes: ExpertAssignment, bias_EN: Tensor | None, wide: bool
    ) -> Tensor:
        """One product per expert with pairs, or per pair if shapes must be fixed.

        Few pairs with 16-bit experts, and on a GPU with any, use one call of our kernel, which
        reads their experts without synchronization.
        """
        w_ENK, few = self.tensor, routes.few(len(self.tensor))
        if few and on_card.multiplies_experts(x_MK, w_ENK):
            dtype = torch.float32 if wide else x_MK.dtype
            return on_card.product_of_dense_experts(x_MK, w_ENK, routes.pairs, bias_EN, dtype)
        if few and compiled.runs(x_MK) and has_kernel(x_MK[:1], w_ENK[0]):
            sums_PN = routed_by_kernel(x_MK, w_ENK, routes.pairs, bias_EN, self._bf16_dot)
            return sums_PN if wide else compiled.cast(sums_PN, x_MK.dtype)
        if routes.static:
            x_PK = x_MK[routes.rows(torch.arange(len(routes.expert_N), device=x_MK.device))]
            return each_own(
                x_PK, w_ENK, routes.expert_N, bias_EN, at_once=routes.at_once, wide=wide
            )
        product = product_bf16_dot if self._bf16_dot else linear_fp32_out if wide else linear
        return routes.by_expert(x_MK, bias_EN, lambda e, x, b: product(x, w_ENK[e], b))

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

    def quantized_input(self, x: Tensor) -> Tensor:
        """`x` in the dtype of the inputs, rounded with `bf16_dot`."""
        return (x.bfloat16() if self._bf16_dot else x).to(self._inputs)


def writable(weight: Weight) -> Tensor:
    """The writable tensor of a dense weight. Raises TypeError for other kinds."""
    if not isinstance(weight, Dense) or weight.in_file:
        raise TypeError(f"a weight in {weight.format} is not filled number by number")
    return weight.tensor
