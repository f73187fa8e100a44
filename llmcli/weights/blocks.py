"""GPU weights in GGUF blocks with the file's layout.

Products of few rows use the blocks directly. For many rows, or without kernels, parts of the matrix
are dequantized to the dtype of the input.

Axes: M rows of the input, K columns of it, N outputs; r bytes of a row of blocks; E experts, P
pairs of a row and an expert.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from llmcli.config.formats import DEQUANTIZED_AT_ONCE, stored_bytes
from llmcli.ops import on_card
from llmcli.ops.linear import each_own, linear, linear_fp32_out
from llmcli.ops.quant import dequantize
from llmcli.weights.routes import ExpertAssignment
from llmcli.weights.weight import BlockQuantized, Product


class FileLayoutWeight(BlockQuantized):
    """One matrix `[N, K]`, or experts' `[E, N, K]`, in a format of `ON_CARD`; `write` fills it.

    Inputs of products have the dtype `inputs`. Numbers are exactly those of `ops.quant`; for many
    rows they are rounded to 16 bits if the inputs have 16 bits.
    """

    def __init__(
        self, format: str, shape: tuple[int, ...], *, device: torch.device, inputs: torch.dtype
    ) -> None:
        self.format, self.shape = format, shape
        self._inputs = inputs
        size = stored_bytes(format, 1, shape[-1])
        self.data = torch.empty(prod(shape[:-1]), size, dtype=torch.uint8, device=device)

    def write(self, rows: Tensor, raw: Tensor) -> None:
        """Write rows (int64 `[n]`) from a file's blocks, uint8 `[n, bytes]`."""
        self.data.index_copy_(0, rows.to(self.data.device), raw.to(self.data.device))

    def memory(self) -> list[Tensor]:
        """The tensor of blocks."""
        return [self.data]

    def _multiply(self, x: Tensor, bias_N: Tensor | None, product: Product) -> Tensor:
        if on_card.multiplies_blocks(x):
            dtype = x.dtype if product is linear else torch.float32
            return on_card.product_of_blocks(x, self.data, self.format, bias_N, dtype)
        if len(self.shape) == 3:
            raise TypeError("matrices of experts support `matmul_routed` only")
        rows, columns = self.shape
        parts = []
        step = max(1, DEQUANTIZED_AT_ONCE // columns)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            w_NK = self.dense(x.dtype, rows=part)
            parts.append(product(x, w_NK, None if bias_N is None else bias_N[part]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _multiply_routed(
        self, x_MK: Tensor, routes: ExpertAssignment, bias_EN: Tensor | None, wide: bool
    ) -> Tensor:
        """Few pairs use a kernel that reads their experts on the device."""
        experts, rows, columns = self.shape
        expert_P = routes.expert_N
        raw_ENr = self.data.view(experts, rows, -1)
        if routes.few(experts) and on_card.takes(x_MK, "packed"):
            dtype = torch.float32 if wide else x_MK.dtype
            return on_card.product_of_experts(
                x_MK, raw_ENr, self.format, routes.pairs, bias_EN, dtype
            )
        if routes.static:  # no data, or no kernels
            every_P = torch.arange(len(expert_P), device=x_MK.device)
            chosen = raw_ENr.index_select(0, expert_P).flatten(0, 1)
            w_PNK = dequantize(chosen, self.format, dtype=x_MK.dtype).view(-1, rows, columns)
            b_PN = None if bias_EN is None else bias_EN.index_select(0, expert_P)
            x_PK = x_MK[routes.rows(every_P)]
            return each_own(x_PK, w_PNK, every_P, b_PN, at_once=routes.at_once, wide=wide)

        def product(expert: int, x: Tensor, bias_N: Tensor | None) -> Tensor:
            w_NK = dequantize(raw_ENr[expert], self.format, dtype=x.dtype)
            return (linear_fp32_out if wide else linear)(x, w_NK, bias_N)

        return routes.by_expert(x_MK, bias_EN, product)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids`, dequantized to float32."""
        raw = self.data.index_select(0, ids.flatten())
        numbers = dequantize(raw, self.format, dtype=torch.float32)
        return numbers.view(*ids.shape, self.shape[-1])

    def dense(self, dtype: torch.dtype | None = None, *, rows: slice = slice(None)) -> Tensor:
        """Dequantized to float32, then converted to `dtype`: a copy, up to 7 times as large.

        For experts `rows` selects matrices.
        """
        chosen = self.data.view(*self.shape[:-1], -1)[rows]
        numbers = dequantize(chosen.flatten(0, -2), self.format, dtype=dtype or torch.float32)
        return numbers.view(*chosen.shape[:-1], -1)

    def quantized_input(self, x: Tensor) -> Tensor:
        """`x` in the dtype of the inputs."""
        return x.to(self._inputs)
