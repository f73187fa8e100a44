"""Per-head products with separate matrices, and joins of heads.

For one token, 16-bit inputs are widened for our kernel, with float32 results; PyTorch's products
have the dtype of the input.

Axes: B batch, T tokens, H heads, K inputs, N rows of a matrix, c columns of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.ops import compiled
from llmcli.ops.norm import at_least_float32


def join(x_BTHd: Tensor, y_BTHe: Tensor) -> Tensor:
    """Concatenate x and y per head: `[B, T, H, d + e]`."""
    if compiled.takes(x_BTHd) and compiled.takes(y_BTHe):
        return compiled.join(x_BTHd, y_BTHe)
    return torch.cat((x_BTHd, y_BTHe), -1)


def to_columns(x_BHTK: Tensor, w_HNc: Tensor) -> Tensor:
    """`X[:N] W` followed by the remaining K - N numbers of X: `[B, H, T, c + K - N]`."""
    if compiled.has_heads(x_BHTK, w_HNc):
        return compiled.multiply_heads(at_least_float32(x_BHTK), w_HNc, turned=True)
    x_BHTN, rest = x_BHTK.tensor_split([w_HNc.shape[1]], -1)
    return torch.cat((x_BHTN @ w_HNc.to(x_BHTK.dtype), rest), -1)


def to_rows(x_BHTc: Tensor, w_HNc: Tensor) -> Tensor:
    """`X Wᵀ`: `[B, H, T, N]`."""
    if compiled.has_heads(x_BHTc, w_HNc):
        return compiled.multiply_heads(at_least_float32(x_BHTc), w_HNc, turned=False)
    return x_BHTc @ w_HNc.mT.to(x_BHTc.dtype)
