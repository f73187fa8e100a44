"""Attention of one query per head, with keys split over programs; see `ops.attention.attend`.

The number of live keys is read on the device, so that a captured step reads only these.

Axes: B batch, H heads, K key/value heads, G = H/K heads that share one, C slots, P splits, d size
of a query and key, e of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmcli.config.attention import Chunk, Window, most_keys

_BLOCK = 1 << 14  # bytes of the keys of a block: three in flight, with values, are 96 KiB
_SPLIT = 256  # keys of a program: 8 kv heads with 8k keys are 256 programs, two for each processor


@triton.jit
def split_kernel(
    q, k, v, starts, sums, most, weight, scale, cap, k_b, k_h, k_s, v_b, v_h, v_s,
    kv_heads, splits, window,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr, CAPPED: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """For one kv head and the live keys of a split: Σ e^(s - m) v, m and Σ e^(s - m).

    GROUP, SIZE and VALUES are G, D and E rounded up to powers of two for tensor cores.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    b = head // kv_heads
    at = tl.load(starts + b).to(tl.int32)
    g, n, e = tl.arange(0, GROUP), tl.arange(0, SIZE), tl.arange(0, VALUES)
    q_Gd = tl.load(
        q + (head * G + g[:, None]) * D + n[None, :], (g[:, None] < G) & (n[None, :] < D), 0.0
    )
    first = split * SPLIT
    last = tl.minimum(first + SPLIT, at + 1)
    oldest = at - at % window if CHUNKS else at - window + 1
    first = tl.maximum(first, oldest // KEYS * KEYS)
    h = (head % kv_heads).to(tl.int64)
    k += b.to(tl.int64) * k_b + h * k_h
    v += b.to(tl.int64) * v_b + h * v_h
    m_G = tl.full([GROUP], float("-inf"), tl.float32)
    l_G = tl.zeros([GROUP], tl.float32)
    acc_Ge = tl.zeros([GROUP, VALUES], tl.float32)
    for start in range(first, last, KEYS):
        s = start + tl.arange(0, KEYS)
        seen_S = (s < last) & (s >= oldest)
        rows = s.to(tl.int64)
        k_Sd = tl.load(
            k + rows[:, None] * k_s + n[None, :], seen_S[:, None] & (n[None, :] < D), 0.0
        )
        s_GS = tl.dot(q_Gd, tl.trans(k_Sd).to(q_Gd.dtype), input_precision="ieee") * scale
        if CAPPED:
            s_GS = cap * (1 - 2 / (tl.exp(2 * s_GS / cap) + 1))
        s_GS = tl.where(seen_S[None, :], s_GS, float("-inf"))
        new_G = tl.maximum(m_G, tl.max(s_GS, 1))
        base_G = tl.where(new_G == float("-inf"), 0.0, new_G)
        p_GS = tl.exp(s_GS - base_G[:, None])
        shrink_G = tl.exp(m_G - base_G)
        v_Se = tl.load(
            v + rows[:, None] * v_s + e[None, :], seen_S[:, None] & (e[None, :] < E), 0.0
        )
        l_G = l_G * shrink_G + tl.sum(p_GS, 1)
        acc_Ge = acc_Ge * shrink_G[:, None]
        acc_Ge += tl.dot(p_GS.to(q_Gd.dtype), v_Se.to(q_Gd.dtype), input_precision="ieee")
        m_G = new_G
    row_G = (head * splits + split) * G + g
    tl.store(most + row_G, m_G, g < G)
    tl.store(weight + row_G, l_G, g < G)
    tl.store(sums + row_G[:, None] * E + e[None, :], acc_Ge, (g[:, None] < G) & (e[None, :] < E))


@triton.jit
def join_kernel(
    sums, most, weight, sinks, out, heads, splits,
    G: tl.constexpr, E: tl.constexpr, VALUES: tl.constexpr, SPLITS: tl.constexpr,
    SUNK: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head, and its sink."""
    head = tl.program_id(0)
    p, e = tl.arange(0, SPLITS), tl.arange(0, VALUES)
    row_P = (head // G * splits + p) * G + head % G
    m_P = tl.load(most + row_P, p < splits, float("-inf"))
    m = tl.max(m_P, 0)
    if SUNK:
        sink = tl.load(sinks + head % heads).to(tl.float32)
        m = tl.maximum(m, sink)
    scale_P = tl.exp(m_P - m)
    total = tl.sum(tl.load(weight + row_P, p < splits, 0.0) * scale_P, 0)
    if SUNK:
        total += tl.exp(sink - m)
    acc_Pe = tl.load(
        sums + row_P[:, None] * E + e[None, :], (p[:, None] < splits) & (e[None, :] < E), 0.0
    )
    z_e = tl.sum(acc_Pe * scale_P[:, None], 0) / total
    tl.store(out + head * E + e, z_e.to(out.dtype.element_ty), e < E)


def keys_of(size: int, itemsize: int) -> int:
    """Number of keys per block with heads padded to `size`; at least 16 for tensor cores."""
    return min(64, max(16, _BLOCK // (size * itemsize)))


def attend_one(
    q_BH1d: Tensor, k_BKCd: Tensor, v_BKCe: Tensor, starts_B: Tensor, *, scale: float,
    window: Window | None = None, cap: float | None = None, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`attend` of the token at position `starts[b]` of each sequence: `[B, H, 1, e]`.

    It sees the slots up to its own, or the last `window`, or those of its chunk. Keys and values
    are contiguous in the last axis. The result has the dtype of the queries, at most float32;
    16-bit products have float32 sums.
    """
    batch, heads, _, size = q_BH1d.shape
    _, kv_heads, slots, values = v_BKCe.shape
    group, splits = heads // kv_heads, triton.cdiv(slots, _SPLIT)
    q = q_BH1d.contiguous()
    shape = (batch, kv_heads, splits, group)
    sums = q.new_empty(*shape, values, dtype=torch.float32)
    most, weight = q.new_empty(2, *shape, dtype=torch.float32)
    padded = {
        "GROUP": max(16, triton.next_power_of_2(group)),
        "SIZE": max(16, triton.next_power_of_2(size)),
        "VALUES": max(16, triton.next_power_of_2(values)),
    }
    split_kernel[(batch * kv_heads, splits)](
        q, k_BKCd, v_BKCe, starts_B, sums, most, weight, scale, cap or 0.0,
        *k_BKCd.stride()[:3], *v_BKCe.stride()[:3], kv_heads, splits,
        most_keys(window) or 1 << 30,
        G=group, D=size, E=values, SPLIT=_SPLIT, CAPPED=cap is not None, **padded,
        CHUNKS=isinstance(window, Chunk),
        KEYS=keys_of(max(padded["SIZE"], padded["VALUES"]), k_BKCd.element_size()),
    )  # fmt: skip
    out = torch.empty(batch, heads, 1, values, device=q.device, dtype=q.dtype)
    join_kernel[(batch * heads,)](
        sums, most, weight, sums if sinks_H is None else sinks_H, out, heads, splits,
        G=group, E=values, VALUES=padded["VALUES"], SPLITS=triton.next_power_of_2(splits),
        SUNK=sinks_H is not None,
    )  # fmt: skip
    return out
