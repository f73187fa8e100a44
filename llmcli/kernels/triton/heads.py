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

from llmcli.config.attention import QueryGrowth
from llmcli.kernels.triton.products import Norm, normed, statistics


@triton.jit
def turned(
    row, n, w, cos, sin, eps, offset, narrow: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr, WEIGHTS: tl.constexpr,
    JOINED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Head n of a row with its norm and rotation, each rounded: see `ops.norm`, `ops.rope`.

    KIND as in `row_kernel`; JOINED > 0: the norm is of as many heads together.
    """
    i, x = tl.arange(0, SIZE), row + n * D
    one = tl.load(x + i, i < D, 0.0).to(tl.float32)
    mean, inverse = 0.0, 1.0
    if KIND > 0:
        if JOINED > 0:
            mean, inverse = statistics(row, JOINED * D, eps, KIND, 1024)
            w += n * D
        else:
            mean, inverse = statistics(x, D, eps, KIND, SIZE)
        one = normed(one, mean, inverse, w, w, i, i < D, offset, WEIGHTS, False)
        one = one.to(narrow).to(tl.float32)
    if R > 0:
        pair, there = tl.where(i < R // 2, i + R // 2, i - R // 2), i < R
        other = tl.load(x + pair, there, 0.0).to(tl.float32)
        if KIND > 0:
            other = normed(other, mean, inverse, w, w, pair, there, offset, WEIGHTS, False)
            other = other.to(narrow).to(tl.float32)
        one = one * tl.load(cos + i, there, 1.0) + other * tl.load(sin + i, there, 0.0)
    return one.to(narrow)


@triton.jit
def heads_kernel(
    x, q_w, k_w, v_w, cos, sin, starts, q, k, v, x_row, k_b, k_h, k_s, v_b, v_h, v_s,
    eps, offset, v_eps, v_offset, beta, first, original,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    R: tl.constexpr, KIND: tl.constexpr, WEIGHTS: tl.constexpr, JOINED: tl.constexpr,
    V_KIND: tl.constexpr, V_WEIGHTS: tl.constexpr, GROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One head of a token's H queries, K keys and V values, side by side in `x`; V 0: keys are."""
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.load(starts + b).to(tl.int64)
    i = tl.arange(0, SIZE)
    narrow: tl.constexpr = q.dtype.element_ty
    x += b * x_row
    cos += at * R
    sin += at * R
    if n < H:
        y = turned(
            x, n, q_w, cos, sin, eps, offset, narrow, D, R, KIND, WEIGHTS, JOINED * H, SIZE
        )
        if GROWS:
            grown = 1 + beta * tl.log(1 + ((at + first) // original).to(tl.float32))
            y = (y.to(tl.float32) * grown).to(narrow)
        tl.store(q + (b * H + n) * D + i, y, i < D)
    elif n < H + K:
        n -= H
        x += H * D
        y = turned(
            x, n, k_w, cos, sin, eps, offset, narrow, D, R, KIND, WEIGHTS, JOINED * K, SIZE
        )
        k += b * k_b + n.to(tl.int64) * k_h + at * k_s
        tl.store(k + i, y.to(k.dtype.element_ty), i < D)
    else:
        n -= H + K
        x += (H + K if V else H) * D
        value = tl.load(x + n * E + i, i < E, 0.0)
        if V_KIND > 0:
            value = turned(
                x, n, v_w, cos, sin, v_eps, v_offset, narrow, E, 0, V_KIND, V_WEIGHTS, 0, SIZE
            )
        v += b * v_b + n.to(tl.int64) * v_h + at * v_s
        tl.store(v + i, value.to(v.dtype.element_ty), i < E)


def enter(
    x_BN: Tensor, heads: tuple[int, int, int], caches: tuple[Tensor, Tensor], starts_B: Tensor, *,
    dtype: torch.dtype, norms: Sequence[Norm | None], tables_CR: tuple[Tensor, Tensor] | None,
    growth: QueryGrowth | None = None,
) -> Tensor:  # fmt: skip
    """Write a token's keys and values into slots `starts[b]`; return its queries `[B, H, 1, d]`.

    Rows of x begin with H queries, K keys and V values: `heads`. Without values they are the keys
    as they are here. `norms` (without a bias) are those of queries, keys and values; weights of
    more than a head's size mean that all heads are normalized together. Queries and keys, rounded
    to `dtype` after their norm, are rotated by tables of all positions (or not), and rounded again,
    queries scaled by `growth` and rounded again; keys then, and values, to the caches' dtypes.
    """
    batch, size, values = len(x_BN), caches[0].shape[3], caches[1].shape[3]
    q_BH1d = torch.empty(batch, heads[0], 1, size, device=x_BN.device, dtype=dtype)
    none: Norm = (None, None, 0.0, 0, 0.0)
    (q_w, _, eps, kind, offset), (k_w, *_), (v_w, _, v_eps, v_kind, v_offset) = (
        one or none for one in norms
    )
    weights = (x_BN if one is None else one for one in (q_w, k_w, v_w))
    heads_kernel[(heads[0] + 2 * heads[1], batch)](
        x_BN, *weights, *(tables_CR or (x_BN, x_BN)), starts_B, q_BH1d, *caches, x_BN.stride(0),
        *caches[0].stride()[:3], *caches[1].stride()[:3], eps, offset, v_eps, v_offset,
        *((growth.beta, growth.first, growth.original) if growth else (0.0, 0, 1)),
        H=heads[0], K=heads[1], V=heads[2], D=size, E=values,
        R=tables_CR[0].shape[1] if tables_CR else 0, KIND=kind, WEIGHTS=q_w is not None,
        JOINED=q_w is not None and q_w.numel() > size, V_KIND=v_kind, V_WEIGHTS=v_w is not None,
        GROWS=growth is not None, SIZE=triton.next_power_of_2(max(size, values)), num_warps=1,
    )  # fmt: skip
    return q_BH1d
