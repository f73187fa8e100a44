"""Products of rows with dense matrices of their experts, and the sums over a token's experts.

Equivalents of `ops.linear.each_own` and `ops.routing.summed`. A program reads some rows of its
expert's matrix where they lie.

Axes: M rows of the input, K columns of it, N outputs; E experts, P pairs of a row and an expert;
B batch, C experts of a token, T tokens, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmcli.kernels.triton.packed import Routed
from llmcli.kernels.triton.products import (
    COLUMNS,
    ROWS,
    Hidden,
    Onto,
    accumulated,
    hidden_constants,
    hidden_layer,
)

_SUMMED = 512  # columns of a program


@triton.jit
def expert_kernel(
    x, w, bias, weight, out, expert, row, columns, outputs, w_expert, w_row, bias_row, each,
    limit, plus,
    BIAS: tl.constexpr, ROW: tl.constexpr, WEIGHED: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Output p uses matrix `expert[p]` and row p // `each` of x, or with ROW row `row[p]`.

    WEIGHED: the row is multiplied by `weight[p]` first. ACT and what follows as in `row_kernel`.
    """
    p = tl.program_id(1)
    own = tl.load(expert + p)
    source = tl.load(row + p) if ROW else (p // each).to(tl.int64)
    w += own * w_expert
    bias += own * bias_row
    x += source * columns
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    rows = n.to(tl.int64)[:, None] * w_row
    below = (n + outputs).to(tl.int64)[:, None] * w_row
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        at = start + c
        one = tl.load(x + at, at < columns, 0.0).to(tl.float32)
        if WEIGHED:
            one = (one * tl.load(weight + p)).to(x.dtype.element_ty).to(tl.float32)
        both = (n[:, None] < outputs) & (at < columns)[None, :]
        sums, ups = accumulated(sums, ups, one, w + at[None, :], rows, below, both, GATED)
    y = tl.sum(sums, 1)
    if BIAS:
        y += tl.load(bias + n, n < outputs, 0.0).to(tl.float32)
    narrow = out.dtype.element_ty
    if ACT >= 0:
        up = tl.sum(ups, 1)
        if BIAS and GATED:
            up += tl.load(bias + outputs + n, n < outputs, 0.0).to(tl.float32)
        y = hidden_layer(y, up, limit, plus, narrow, ACT, GATED, CLAMPED)
    tl.store(out + p.to(tl.int64) * outputs + n, y.to(narrow), n < outputs)


def expert_product(
    x_MK: Tensor, w_ENK: Tensor, pairs: Routed, bias_EN: Tensor | None = None, *,
    out: torch.dtype, hidden: Hidden | None = None, weight_P: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`X Wᵀ + b` of P pairs of a row and an expert, `[P, N]` in the dtype `out`; see `Routed`.

    Sums are float32 and rounded once, with the bias; what becomes of the `hidden` layer is rounded
    like separate operations, and so are rows times a `weight`.
    """
    expert_P, row_P, each = pairs
    outputs, clamp, how = hidden_constants(w_ENK.shape[1], hidden)
    y_PN = torch.empty(len(expert_P), outputs, device=x_MK.device, dtype=out)
    expert_kernel[(triton.cdiv(outputs, ROWS), len(expert_P))](
        x_MK.contiguous(), w_ENK, x_MK if bias_EN is None else bias_EN,
        x_MK if weight_P is None else weight_P, y_PN, expert_P,
        expert_P if row_P is None else row_P, x_MK.shape[1], outputs, *w_ENK.stride()[:2],
        0 if bias_EN is None else bias_EN.stride(0), each, *clamp, BIAS=bias_EN is not None,
        ROW=row_P is not None, WEIGHED=weight_P is not None, ROWS=ROWS, COLUMNS=COLUMNS, **how,
    )  # fmt: skip
    return y_PN


@triton.jit
def sum_kernel(
    y, weight, rest, x, gate, stream, out, tokens, columns, factor,
    CHOSEN: tl.constexpr, WEIGHED: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr,
    ONTO: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one token. GATED: `rest` is multiplied by σ(x · gate)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = at < columns
    y += (token // tokens * CHOSEN * tokens + token % tokens) * columns
    sums = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(CHOSEN):
        one = tl.load(y + at, there, 0.0)
        if WEIGHED:
            one *= tl.load(weight + token * CHOSEN + k)
        sums += one
        y += tokens * columns
    if ADDS:
        one = tl.load(rest + token * columns + at, there, 0.0)
        if GATED:
            products = tl.zeros([COLUMNS], tl.float32)
            for start in range(0, columns, COLUMNS):
                c = start + tl.arange(0, COLUMNS)
                read = tl.load(x + token * columns + c, c < columns, 0.0).to(tl.float32)
                products += read * tl.load(gate + c, c < columns, 0.0).to(tl.float32)
            one *= 1 / (1 + tl.exp(-tl.sum(products, 0)))
        sums += one
    if ONTO:
        sums = sums * factor + tl.load(stream + token * columns + at, there, 0.0)
    tl.store(out + token * columns + at, sums, there)


def sum_experts(
    y_BCTD: Tensor, weight_BTC: Tensor | None, rest_BTD: Tensor | None,
    gate: tuple[Tensor, Tensor] | None = None, *, onto: Onto | None = None,
) -> Tensor:  # fmt: skip
    """`ops.routing.summed` of float32: `[B, T, D]`.

    `gate`: x `[B, T, D]` and w `[1, D]`, rest is multiplied by `σ(x · w)`. `onto`: the sum is added
    to a stream; it has no norm.
    """
    batch, chosen, tokens, columns = y_BCTD.shape
    out_BTD = y_BCTD.new_empty(batch, tokens, columns)
    stream, _, factor = onto or (None, None, 1.0)
    given = weight_BTC, rest_BTD, *(gate or (None, None)), stream
    sum_kernel[(batch * tokens, triton.cdiv(columns, _SUMMED))](
        y_BCTD.contiguous(), *(y_BCTD if one is None else one.contiguous() for one in given),
        out_BTD, tokens, columns, factor, CHOSEN=chosen, WEIGHED=weight_BTC is not None,
        ADDS=rest_BTD is not None, GATED=gate is not None, ONTO=onto is not None, COLUMNS=_SUMMED,
    )  # fmt: skip
    return out_BTD
