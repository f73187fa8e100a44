"""Normalizations over the last axis.

Axes: B batch, T tokens, D width. 16-bit inputs are widened: the mean of squares of a bfloat16 row
would lose three digits. The result is rounded once to `dtype` (default: the input's).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.kernels import program
from llmcli.kernels.program import bits, call
from llmcli.ops import compiled, on_card


def rms_norm(
    x_BTD: Tensor, w_D: Tensor | None, eps: float, dtype: torch.dtype | None = None, *,
    offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """`x / sqrt(mean(x²) + eps) ∘ (offset + w)` (Zhang & Sennrich 2019, arXiv 1910.07467).

    Without weights only the quotient; weights may be `[n, D]`, for the last axes. PyTorch has a
    fused kernel on CUDA only; its CPU path stores each step of the formula (512 rows of 576
    float32: 816 µs, against 72 µs here).
    """
    dtype = dtype or x_BTD.dtype
    found = _by_kernel(x_BTD, w_D, None, eps, dtype, False, offset)
    if found is not None:
        return found
    x_BTD = at_least_float32(x_BTD)
    if x_BTD.is_cuda:
        if w_D is not None and w_D.ndim == 1 and w_D.dtype == x_BTD.dtype == dtype:
            return F.rms_norm(x_BTD, w_D.shape, _offset(w_D, dtype, offset), eps)
        y_BTD = F.rms_norm(x_BTD, x_BTD.shape[-1:], None, eps)
        return _weighted(y_BTD, w_D, None, dtype, offset)
    if w_D is None:
        return (x_BTD * _inverse_rms(x_BTD, eps)).to(dtype)
    w_D = _offset(w_D, x_BTD.dtype, offset)
    size = x_BTD.shape[-1]
    if x_BTD.numel() == size:
        # one row: the number of calls dominates. (x, -x) has mean 0 and variance mean(x²), so the
        # fused LayerNorm computes it in half the time of the separate steps
        both = torch.cat((x_BTD, -x_BTD), -1)
        return F.layer_norm(both, (2 * size,), None, None, eps)[..., :size].mul_(w_D).to(dtype)
    return (x_BTD * _inverse_rms(x_BTD, eps)).mul_(w_D).to(dtype)


@cache
def ones(columns: int) -> Tensor:
    """Factors that change nothing; cached, since recorded steps hold their address."""
    return torch.ones(columns)


def _by_kernel(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, dtype: torch.dtype, centred: bool,
    offset: float,
) -> Tensor | None:  # fmt: skip
    """`rms_norm`, or with `centred` `layer_norm`; rows of x may have gaps. None without a kernel.

    Weights may be `[n, D]`, one for each of n rows in turn.
    """
    if on_card.normalizes(x, w):
        return on_card.normalize(x, w, b, eps, dtype, centred=centred, offset=offset)
    x = at_least_float32(x)
    if not compiled.takes(x):
        return None
    w = w if w is None or w.dtype == torch.float32 else compiled.widened(w)
    b = b if b is None or b.dtype == torch.float32 else compiled.widened(b)
    columns, groups = x.shape[-1], compiled.in_groups(x)
    factors, sets = (ones(columns).data_ptr(), 1) if w is None else (w, w.numel() // columns)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = groups, groups.stride(1), out, x.numel() // columns, columns, factors, b
    more = bits(eps), centred, bits(offset), groups.shape[1], groups.stride(0), sets
    call(program.NORMALIZE, *rows, *more, out=out)
    return compiled.cast(out, dtype) if dtype in compiled.EMULATED else out.to(dtype)


def _offset(w_D: Tensor, dtype: torch.dtype, offset: float) -> Tensor:
    w_D = w_D.to(dtype)
    return w_D + offset if offset else w_D


def _weighted(
    x_BTD: Tensor, w_D: Tensor | None, b_D: Tensor | None, dtype: torch.dtype, offset: float
) -> Tensor:
    """`x ∘ (offset + w) + b` on CUDA, where a launch widens its operands and rounds its result.

    PyTorch's fused norms have one dtype: 16-bit weights would be converted first, and the result
    after, in a launch each.
    """
    if w_D is not None and offset:
        w_D = _offset(w_D, x_BTD.dtype, offset)
    out_BTD = torch.empty_like(x_BTD, dtype=dtype)
    if b_D is None:
        return x_BTD.to(dtype) if w_D is None else torch.mul(x_BTD, w_D, out=out_BTD)
    if w_D is None:
        return torch.add(x_BTD, b_D, out=out_BTD)
    return torch.addcmul(b_D, x_BTD, w_D, out=out_BTD)


def _inverse_rms(x_BTD: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean(x²) + eps)`, `[B, T, 1]`."""
    norm_BT1: Tensor = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True)
    return norm_BT1.square_().div_(x_BTD.shape[-1]).add_(eps).rsqrt_()


def layer_norm(
    x_BTD: Tensor, w_D: Tensor | None, b_D: Tensor | None, eps: float,
    dtype: torch.dtype | None = None, *, offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """`(x - mean(x)) / sqrt(var(x) + eps) ∘ (offset + w) + b`, biased variance (Ba et al. 2016).

    Without weights only the quotient, and b; without b weights may be `[n, D]`, for the last axes.
    """
    dtype = dtype or x_BTD.dtype
    found = _by_kernel(x_BTD, w_D, b_D, eps, dtype, True, offset)
    if found is not None:
        return found
    x_BTD = at_least_float32(x_BTD)
    given = (one.dtype for one in (w_D, b_D) if one is not None)
    if x_BTD.is_cuda and {dtype, *given} != {x_BTD.dtype}:
        y_BTD = F.layer_norm(x_BTD, x_BTD.shape[-1:], None, None, eps)
        return _weighted(y_BTD, w_D, b_D, dtype, offset)
    w_D = None if w_D is None else _offset(w_D, x_BTD.dtype, offset)
    b_D = None if b_D is None else b_D.to(x_BTD.dtype)
    if w_D is not None and w_D.ndim > 1:
        return (w_D * layer_norm(x_BTD, None, None, eps)).to(dtype)
    return F.layer_norm(x_BTD, x_BTD.shape[-1:], w_D, b_D, eps).to(dtype)


def l2_norm(x_BTNd: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """`x / sqrt(Σ x² + eps) · factor` over the last axis: a vector of length `factor`.

    eps is inside the root, as for queries and keys of gated DeltaNet in flash-linear-attention and
    Qwen3-Next; `F.normalize` has `max(‖x‖, eps)` instead. Zero rows stay zero.
    """
    wide_BTNd = at_least_float32(x_BTNd)
    if wide_BTNd.ndim == 4 and compiled.takes(wide_BTNd):
        batch, tokens, rows, size = wide_BTNd.shape
        wide_BTNd, far = compiled.evenly_spaced(wide_BTNd)
        out = torch.empty(wide_BTNd.shape)
        shape = batch * tokens, rows, size, bits(eps), bits(factor)
        return call(program.UNIT, wide_BTNd, far, out, *shape, out=out).to(x_BTNd.dtype)
    by_BTN1 = (wide_BTNd.square().sum(-1, keepdim=True) + eps).rsqrt_().mul_(factor)
    return (wide_BTNd * by_BTN1).to(x_BTNd.dtype)


def rms_scale(x_BTD: Tensor, eps: float) -> Tensor:
    """The divisor of `rms_norm`: `sqrt(mean(x²) + eps)`, `[B, T, 1]`, at least float32."""
    wide = at_least_float32(x_BTD)
    return (wide.square().mean(-1, keepdim=True) + eps).sqrt()


def layer_scale(x_BTD: Tensor, eps: float) -> Tensor:
    """The divisor of `layer_norm`: `sqrt(var(x) + eps)`, `[B, T, 1]`, at least float32."""
    wide = at_least_float32(x_BTD)
    return (wide.var(-1, keepdim=True, correction=0) + eps).sqrt()


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged if float64."""
    if x.dtype in compiled.EMULATED:
        return compiled.widened(x)
    return x if x.dtype == torch.float64 else x.float()
