"""Per-head products with separate matrices, and joins of heads.

For one token, 16-bit inputs are widened for our kernel, with float32 results; PyTorch's products
have the dtype of the input.

Axes: B batch, T tokens, H heads, K inputs, N rows of a matrix, c columns of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.kernels import program
from llmcli.kernels.program import call
from llmcli.ops import compiled
from llmcli.ops.norm import at_least_float32


def join(x_BTHd: Tensor, y_BTHe: Tensor) -> Tensor:
    """Concatenate x and y per head: `[B, T, H, d + e]`."""
    if not compiled.takes(x_BTHd, y_BTHe):
        return torch.cat((x_BTHd, y_BTHe), -1)
    groups, y_BTHe = compiled.in_groups(x_BTHd), y_BTHe.contiguous()
    first, second = x_BTHd.shape[-1], y_BTHe.shape[-1]
    out = torch.empty(*x_BTHd.shape[:-1], first + second)
    both = groups, groups.stride(1), first, y_BTHe, second
    return call(program.JOIN, *both, out, *groups.shape[:2], groups.stride(0), out=out)


def to_columns(x_BHTK: Tensor, w_HNc: Tensor) -> Tensor:
    """`X[:N] W` followed by the remaining K - N numbers of X: `[B, H, T, c + K - N]`."""
    if has_kernel(x_BHTK, w_HNc):
        return _by_kernel(x_BHTK, w_HNc, turned=True)
    x_BHTN, rest = x_BHTK.tensor_split([w_HNc.shape[1]], -1)
    return torch.cat((x_BHTN @ w_HNc.to(x_BHTK.dtype), rest), -1)


def to_rows(x_BHTc: Tensor, w_HNc: Tensor) -> Tensor:
    """`X Wᵀ`: `[B, H, T, N]`."""
    if has_kernel(x_BHTc, w_HNc):
        return _by_kernel(x_BHTc, w_HNc, turned=False)
    return x_BHTc @ w_HNc.mT.to(x_BHTc.dtype)


def has_kernel(x_BHTk: Tensor, w_HNc: Tensor) -> bool:
    """Whether our kernel supports it: one row per head, and contiguous matrix rows."""
    return (
        x_BHTk.shape[2] == 1
        and x_BHTk.numel() > 0
        and x_BHTk.dtype in compiled.NUMBERS
        and compiled.runs(x_BHTk)
        and w_HNc.dtype in compiled.NUMBERS
        and w_HNc.shape[2] % 16 == 0
        and w_HNc.stride(2) == 1
    )


def _by_kernel(x_BH1k: Tensor, w_HNc: Tensor, *, turned: bool) -> Tensor:
    """`to_rows`, or with `turned` `to_columns`."""
    batch, heads, _, given = x_BH1k.shape
    inputs, outputs = w_HNc.shape[1:] if turned else (w_HNc.shape[2], w_HNc.shape[1])
    x_BH1k = at_least_float32(x_BH1k)
    if x_BH1k.stride(3) != 1:
        x_BH1k = x_BH1k.contiguous()
    behind, numbers = given - inputs, compiled.NUMBERS.index(w_HNc.dtype)
    out = torch.empty(batch, heads, 1, outputs + behind)
    x_far, w_far = x_BH1k.stride()[:2], w_HNc.stride()[:2]
    shape = batch, heads, inputs, outputs, behind, numbers, turned
    return call(program.MULTIPLY_HEADS, x_BH1k, *x_far, w_HNc, *w_far, out, *shape, out=out)
