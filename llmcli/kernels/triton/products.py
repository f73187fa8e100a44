"""Norms, and products of few rows with the norms, activations and sums around them.

Equivalents of `ops.norm`, `ops.linear`, `ops.activations` and `ops.elements`. Each program has some
rows of the matrix.

Axes: M rows of the input, few, K columns of it, N outputs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmcli.config.experts import ExpertsConfig
from llmcli.config.mlp import ACTIVATIONS, MlpConfig

ROWS = 8  # of a program
COLUMNS = 512  # of a block of them
_WIDE = 4096  # columns of a row read at once for its norm: their loads wait together


@triton.jit
def activated(x, ACT: tl.constexpr):
    """`ops.activations.activation` number ACT of `ACTIVATIONS`."""
    if ACT == 0:
        return x / (1 + tl.exp(-x))
    if ACT == 1:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if ACT == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1 - 1 / (tl.exp(2 * inner) + 1))
    if ACT == 3:
        return x / (1 + tl.exp(-1.702 * x))
    if ACT == 6:
        return 1 / (1 + tl.exp(-x))
    x = tl.where(x < 0, 0.0, x)  # not `maximum`, which turns NaN into 0
    return x if ACT == 4 else x * x


@triton.jit
def hidden_layer(
    y, up, limit, plus, narrow: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """act(y), and if GATED times `up`, from float32 and rounded like separate operations."""
    y = y.to(narrow).to(tl.float32)
    y = activated(tl.where(y > limit, limit, y) if CLAMPED else y, ACT)
    if GATED:
        up = up.to(narrow).to(tl.float32)
        if CLAMPED:
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + plus
        y = y.to(narrow).to(tl.float32) * up
    return y


@triton.jit
def statistics(x, columns, eps, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    """The mean and the factor of a row's norm."""
    c = tl.arange(0, COLUMNS)
    mean, inverse = 0.0, 1.0
    if KIND == 2:
        total = 0.0
        for start in range(0, columns, COLUMNS):
            total += tl.sum(tl.load(x + start + c, start + c < columns, 0.0).to(tl.float32), 0)
        mean = total / columns
    if KIND > 0:
        squares = 0.0
        for start in range(0, columns, COLUMNS):
            one = tl.load(x + start + c, start + c < columns, 0.0).to(tl.float32) - mean
            squares += tl.sum(tl.where(start + c < columns, one * one, 0.0), 0)
        inverse = 1 / tl.sqrt(squares / columns + eps)
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
        COLUMNS=_wide(columns),
    )  # fmt: skip
    return y_MD


@triton.jit
def accumulated(sums, ups, one, w, rows, below, there, GATED: tl.constexpr):
    """`sums`, and if GATED `ups`, with the products of some columns, `one` of x in float32."""
    sums += one[None, :] * tl.load(w + rows, there, 0.0).to(tl.float32)
    if GATED:
        ups += one[None, :] * tl.load(w + below, there, 0.0).to(tl.float32)
    return sums, ups


@triton.jit
def row_kernel(
    x, norm_w, norm_b, w, bias, residual, post_w, post_b, done, kept_x, out, columns, outputs,
    w_row, eps, offset, post_eps, post_offset, factor, limit, plus,
    KIND: tl.constexpr, WEIGHTS: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, ADDS: tl.constexpr,
    POST: tl.constexpr, POST_WEIGHTS: tl.constexpr, POST_SHIFT: tl.constexpr, KEEPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, POST_WIDE: tl.constexpr,
):  # fmt: skip
    """KIND 0: no norm, 1: RMSNorm, 2: LayerNorm of x before the product; KEEPS: `kept_x` gets it.

    ACT ≥ 0: the result is act(y). GATED: `w` has gates above as many neurons; see `hidden_layer`.
    ADDS: it times `factor` is added to `residual`. POST is the KIND of a norm of the whole row
    before that, by the last program of the row: `done` counts them and is 0 before and after.
    """
    m = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    narrow = w.dtype.element_ty
    x += m * columns
    out += m * outputs
    residual += m * outputs
    mean, inverse = statistics(x, columns, eps, KIND, WIDE)
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
        one = one.to(narrow).to(tl.float32)  # rounded like a product's input
        if KEEPS:
            tl.store(kept_x + m * columns + at, one.to(narrow), there & (tl.program_id(0) == 0))
        both = (n[:, None] < outputs) & there[None, :]
        sums, ups = accumulated(sums, ups, one, w + at[None, :], rows, below, both, GATED)
    y = tl.sum(sums, 1)
    if BIAS:
        y += tl.load(bias + n, n < outputs, 0.0).to(tl.float32)
    if ACT >= 0:
        up = tl.sum(ups, 1)
        if BIAS and GATED:
            up += tl.load(bias + outputs + n, n < outputs, 0.0).to(tl.float32)
        y = hidden_layer(y, up, limit, plus, narrow, ACT, GATED, CLAMPED)
    if ADDS and POST == 0:
        y = y * factor + tl.load(residual + n, n < outputs, 0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), n < outputs)
    if POST > 0:
        tl.debug_barrier()  # all threads have stored their numbers when the program is counted
        if tl.atomic_add(done + m, 1) == tl.num_programs(0) - 1:
            tl.store(done + m, 0)
            mean, inverse = statistics(out, outputs, post_eps, POST, POST_WIDE)
            for start in range(0, outputs, POST_WIDE):
                at = start + tl.arange(0, POST_WIDE)
                there = at < outputs
                one = normed(
                    tl.load(out + at, there, 0.0), mean, inverse, post_w, post_b, at, there,
                    post_offset, POST_WEIGHTS, POST_SHIFT,
                )  # fmt: skip
                one = one * factor + tl.load(residual + at, there, 0.0)
                tl.store(out + at, one, there)


def product(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, *, out: torch.dtype,
    norm: Norm | None = None, hidden: Hidden | None = None, onto: Onto | None = None,
    kept_MK: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`act(norm(X) Wᵀ + b)` of few rows, `[M, N]` in the dtype `out`; sums are float32.

    The `hidden` layer may be gated: W has gates and, below them, as many neurons. `onto`: the
    result, which has float32 then, is added to a stream. The rounding is that of PyTorch's separate
    operations: X is rounded to the dtype of W after its norm, what an activation is taken of and
    gives too, and nothing is that is added to the stream. `kept` gets the rounded X.
    """
    rows, columns = x_MK.shape
    outputs, clamp, how = hidden_constants(w_NK.shape[0], hidden)
    y_MN = torch.empty(rows, outputs, device=x_MK.device, dtype=out)
    none: Norm = (None, None, 0.0, 0, 0.0)
    stream, post, factor = onto or (None, None, 1.0)
    residual_MN = None if stream is None else stream.reshape(rows, outputs).contiguous()
    (w_D, b_D, eps, kind, offset), (w_N, b_N, *numbers) = norm or none, post or none
    tensors = w_D, b_D, w_NK, bias_N, residual_MN, w_N, b_N
    row_kernel[(triton.cdiv(outputs, ROWS), rows)](
        x_MK.contiguous(), *(x_MK if one is None else one for one in tensors),
        done(x_MK.device, rows) if post else x_MK, x_MK if kept_MK is None else kept_MK, y_MN,
        columns, outputs, w_NK.stride(0), eps, offset, numbers[0], numbers[2], factor, *clamp,
        KIND=kind, WEIGHTS=w_D is not None, SHIFT=b_D is not None, BIAS=bias_N is not None,
        ADDS=residual_MN is not None, POST=numbers[1], POST_WEIGHTS=w_N is not None,
        POST_SHIFT=b_N is not None, KEEPS=kept_MK is not None, ROWS=ROWS, COLUMNS=COLUMNS,
        WIDE=_wide(columns), POST_WIDE=_wide(outputs), **how,
    )  # fmt: skip
    return y_MN


def hidden_constants(
    rows: int, hidden: Hidden | None
) -> tuple[int, tuple[float, float], dict[str, int]]:
    """Outputs of a matrix with `rows`, the numbers of the clamp, and constants of the kernels."""
    if hidden is None:
        return rows, (0.0, 0.0), {"ACT": -1, "GATED": False, "CLAMPED": False}
    clamp = (hidden.clamp.limit, hidden.clamp.offset) if hidden.clamp else (0.0, 0.0)
    how = {"ACT": list(ACTIVATIONS).index(hidden.activation), "GATED": hidden.gated}
    return rows // (1 + hidden.gated), clamp, how | {"CLAMPED": hidden.clamp is not None}


def _wide(columns: int) -> int:
    power: int = triton.next_power_of_2(columns)
    return min(_WIDE, power)


@cache
def done(device: torch.device, rows: int) -> Tensor:
    """How many programs of each row are done: 0 between kernels.

    Shared by all kernels of a device, which must not run concurrently. Allocated by the first call,
    which is never a captured one: a step is computed before it is captured.
    """
    return torch.zeros(rows, dtype=torch.int32, device=device)


Hidden = MlpConfig | ExpertsConfig  # whose gates, activation and clamp are meant
Norm = tuple[Tensor | None, Tensor | None, float, int, float]  # weights, bias, eps, KIND, offset
# A float32 stream `[…, N]` of M rows, the norm of what is added to it, and a factor after that.
Onto = tuple[Tensor, Norm | None, float]
