"""What becomes of the queries, keys and values of one token: see `parts.attention`.

Axes: B batch, H heads, K key/value heads, C slots, R rotated dimensions, d size of a query and key,
e of a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmcli.kernels.triton.products import Norm, normed


@triton.jit
def turned(
    x, w, cos, sin, eps, offset, narrow: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, WEIGHTS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """A query or key with its norm and rotation, each rounded: see `ops.norm`, `ops.rope`."""
    i = tl.arange(0, SIZE)
    one = tl.load(x + i, i < D, 0.0).to(tl.float32)
    if NORM:
        inverse = 1 / tl.sqrt(tl.sum(one * one, 0) / D + eps)
        one = normed(one, 0.0, inverse, w, w, i, i < D, offset, WEIGHTS, False)
        one = one.to(narrow).to(tl.float32)
    if R > 0:
        pair, there = tl.where(i < R // 2, i + R // 2, i - R // 2), i < R
        other = tl.load(x + pair, there, 0.0).to(tl.float32)
        if NORM:
            other = normed(other, 0.0, inverse, w, w, pair, there, offset, WEIGHTS, False)
            other = other.to(narrow).to(tl.float32)
        one = one * tl.load(cos + i, there, 1.0) + other * tl.load(sin + i, there, 0.0)
    return one.to(narrow)


@triton.jit
def heads_kernel(
    x, q_w, k_w, cos, sin, starts, q, k, v, x_row, k_b, k_h, k_s, v_b, v_h, v_s, eps, offset,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, WEIGHTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One head of a token's queries, keys and values, which are beside one another in `x`."""
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.load(starts + b).to(tl.int64)
    i = tl.arange(0, SIZE)
    narrow: tl.constexpr = q.dtype.element_ty
    x += b * x_row
    cos += at * R
    sin += at * R
    if n < H:
        y = turned(x + n * D, q_w, cos, sin, eps, offset, narrow, D, R, NORM, WEIGHTS, SIZE)
        tl.store(q + (b * H + n) * D + i, y, i < D)
    elif n < H + K:
        y = turned(x + n * D, k_w, cos, sin, eps, offset, narrow, D, R, NORM, WEIGHTS, SIZE)
        k += b * k_b + (n - H).to(tl.int64) * k_h + at * k_s
        tl.store(k + i, y.to(k.dtype.element_ty), i < D)
    else:
        own = n - H - K
        value = tl.load(x + (H + K) * D + own * E + i, i < E, 0.0)
        v += b * v_b + own.to(tl.int64) * v_h + at * v_s
        tl.store(v + i, value.to(v.dtype.element_ty), i < E)


def enter(
    x_BN: Tensor, heads: int, k_BKCd: Tensor, v_BKCe: Tensor, starts_B: Tensor, *,
    dtype: torch.dtype, norms: Sequence[Norm], tables_CR: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Write a token's keys and values into slots `starts[b]`; return its queries `[B, H, 1, d]`.

    Rows of x begin with H queries, K keys and K values. Queries and keys are normalized by two
    RMSNorms (or none), rounded to `dtype`, rotated by tables of all positions (or not), and rounded
    again; keys then, and values as they are, to the caches' dtypes.
    """
    batch, kv_heads, _, size = k_BKCd.shape
    values = v_BKCe.shape[3]
    q_BH1d = torch.empty(batch, heads, 1, size, device=x_BN.device, dtype=dtype)
    (q_w, _, eps, _, offset), (k_w, *_) = norms or ((None, None, 0.0, 0, 0.0),) * 2
    cos, sin = tables_CR or (x_BN, x_BN)
    heads_kernel[(heads + 2 * kv_heads, batch)](
        x_BN, *(x_BN if one is None else one for one in (q_w, k_w)), cos, sin, starts_B, q_BH1d,
        k_BKCd, v_BKCe, x_BN.stride(0), *k_BKCd.stride()[:3], *v_BKCe.stride()[:3], eps, offset,
        H=heads, K=kv_heads, D=size, E=values, R=cos.shape[1] if tables_CR else 0,
        NORM=bool(norms), WEIGHTS=q_w is not None,
        SIZE=triton.next_power_of_2(max(size, values)), num_warps=1,
    )  # fmt: skip
    return q_BH1d
