"""Norms, and products of few rows with fused norms and activations.

Equivalents of `ops.norm`, `ops.linear`, `ops.activations` and `ops.elements`. Each program has some
rows of the matrix.

Axes: M rows of the input, few, K columns of it, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmcli.config.mlp import CARD_ACTIVATIONS, Activation

ROWS = 8  # of a program
COLUMNS = 512  # of a block of them


@triton.jit
def activated(x, ACT: tl.constexpr):
    """`ops.activations.activation` number ACT of `CARD_ACTIVATIONS`."""
    if ACT == 0:
        return x / (1 + tl.exp(-x))
    if ACT == 1:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if ACT == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1 - 1 / (tl.exp(2 * inner) + 1))
    return tl.maximum(x, 0.0)


@triton.jit
def statistics(x, columns, eps, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    """The mean and the factor of a row's norm."""
    c = tl.arange(0, COLUMNS)
    mean, inverse = 0.0, 1.0
    if KIND == 2:
        total = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, columns, COLUMNS):
            total += tl.load(x + start + c, start + c < columns, 0.0).to(tl.float32)
        mean = tl.sum(total, 0) / columns
    if KIND > 0:
        squares = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, columns, COLUMNS):
            one = tl.load(x + start + c, start + c < columns, 0.0).to(tl.float32) - mean
            squares += tl.where(start + c < columns, one * one, 0.0)
        inverse = 1 / tl.sqrt(tl.sum(squares, 0) / columns + eps)
    return mean, inverse


@triton.jit
def normed(one, mean, inverse, w, b, at, there, offset, WEIGHTS: tl.constexpr, SHIFT: tl.constexpr):
    """Normalize a row's numbers at columns `at`."""
    one = (one - mean) * inverse
    if WEIGHTS:
        one *= tl.load(w + at, there, 0.0).to(tl.float32) + offset
    if SHIFT:
        one += tl.load(b + at, there, 0.0).to(tl.float32)
    return one


@triton.jit
def norm_kernel(
    x, w, b, out, columns, x_row, eps, offset,
    KIND: tl.constexpr, WEIGHTS: tl.constexpr, SHIFT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalize one row; KIND as in `row_kernel`."""
    m = tl.program_id(0).to(tl.int64)
    x += m * x_row
    mean, inverse = statistics(x, columns, eps, KIND, COLUMNS)
    for start in range(0, columns, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        there = at < columns
        one = tl.load(x + at, there, 0.0).to(tl.float32)
        one = normed(one, mean, inverse, w, b, at, there, offset, WEIGHTS, SHIFT)
        tl.store(out + m * columns + at, one.to(out.dtype.element_ty), there)


def normalize(x_MD: Tensor, norm: Norm, out: torch.dtype) -> Tensor:
    """`ops.norm.rms_norm` and `layer_norm` of contiguous rows `[M, D]`, in dtype `out`."""
    rows, columns = x_MD.shape
    w_D, b_D, eps, kind, offset = norm
    y_MD = torch.empty(rows, columns, device=x_MD.device, dtype=out)
    norm_kernel[(rows,)](
        x_MD, *(x_MD if one is None else one for one in (w_D, b_D)), y_MD, columns,
        x_MD.stride(0), eps, offset, KIND=kind, WEIGHTS=w_D is not None, SHIFT=b_D is not None,
        COLUMNS=min(1024, triton.next_power_of_2(columns)),
    )  # fmt: skip
    return y_MD


@triton.jit
def row_kernel(
    x, norm_w, norm_b, w, bias, residual, out, columns, outputs, w_row, eps, offset,
    KIND: tl.constexpr, WEIGHTS: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr,
    ADDS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """KIND 0: no norm, 1: RMSNorm, 2: LayerNorm of x before the product.

    GATED: `w` has gates above as many neurons; the result is act(gate) · neuron. ADDS: add a row.
    """
    m = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    x += m.to(tl.int64) * columns
    mean, inverse = statistics(x, columns, eps, KIND, COLUMNS)
    rows = n.to(tl.int64)[:, None] * w_row
    below = (n + outputs).to(tl.int64)[:, None] * w_row
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        at = start + c
        there = at < columns
        one = tl.load(x + at, there, 0.0).to(tl.float32)
        if KIND > 0:
            one = normed(one, mean, inverse, norm_w, norm_b, at, there, offset, WEIGHTS, SHIFT)
        # rounded like a product's input
        one = one.to(w.dtype.element_ty).to(tl.float32)
        both = (n[:, None] < outputs) & there[None, :]
        sums += one[None, :] * tl.load(w + rows + at[None, :], both, 0.0).to(tl.float32)
        if GATED:
            ups += one[None, :] * tl.load(w + below + at[None, :], both, 0.0).to(tl.float32)
    y = tl.sum(sums, 1)
    if BIAS:
        y += tl.load(bias + n, n < outputs, 0.0).to(tl.float32)
    if GATED:
        up = tl.sum(ups, 1)
        if BIAS:
            up += tl.load(bias + outputs + n, n < outputs, 0.0).to(tl.float32)
        narrow = w.dtype.element_ty
        act = activated(y.to(narrow).to(tl.float32), ACT).to(narrow).to(tl.float32)
        y = act * up.to(narrow).to(tl.float32)
    if ADDS:
        y += tl.load(residual + m * outputs + n, n < outputs, 0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * outputs + n, y.to(out.dtype.element_ty), n < outputs)


def product(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, *, out: torch.dtype,
    norm: Norm | None = None, activation: Activation | None = None,
    residual_MN: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`norm(X) Wᵀ + b + R` of few rows, `[M, N]` in the dtype `out`; sums are float32.

    With an `activation` W has gates and, below them, as many neurons: `act(gate) ∘ neuron`. The
    rounding is that of PyTorch's separate operations.
    """
    rows, columns = x_MK.shape
    gated = activation is not None
    outputs = len(w_NK) // (2 if gated else 1)
    y_MN = torch.empty(rows, outputs, device=x_MK.device, dtype=out)
    w_D, b_D, eps, kind, offset = (None, None, 0.0, 0, 0.0) if norm is None else norm
    row_kernel[(triton.cdiv(outputs, ROWS), rows)](
        x_MK.contiguous(), *(x_MK if one is None else one for one in (w_D, b_D)), w_NK,
        *(x_MK if one is None else one for one in (bias_N, residual_MN)), y_MN, columns, outputs,
        w_NK.stride(0), eps, offset, KIND=kind, WEIGHTS=w_D is not None, SHIFT=b_D is not None,
        BIAS=bias_N is not None, ADDS=residual_MN is not None, GATED=gated,
        ACT=CARD_ACTIVATIONS.index(activation) if activation is not None else -1,
        ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return y_MN


Norm = tuple[Tensor | None, Tensor | None, float, int, float]  # weights, bias, eps, KIND, offset
