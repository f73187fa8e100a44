"""Attention of one query per head, with keys split over programs; see `ops.attention.attend`.

The number of live keys is read on the device, so that a captured step reads only these.

Axes: B batch, H heads, K key/value heads, G = H/K heads that share one, C slots, P splits, d size
of a query and key, e of a value.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmcli.config.attention import Chunk, Window, most_keys

_BLOCK = 1 << 14  # bytes of the keys of a block: three in flight, with values, are 96 KiB
_SPLIT = 256  # keys of a program: 8 kv heads with 8k keys are 256 programs, two for each processor
_JOINED = 32  # splits read at once


@triton.jit
def dot(x, y, sums):
    """`sums + X Y` in float32: narrower Y as it is, times three parts of X that have its dtype.

    Widening Y would hold it in registers, which are not enough. Wider Y is rounded.
    """
    if x.dtype.primitive_bitwidth <= y.dtype.primitive_bitwidth:
        return tl.dot(x, y.to(x.dtype), sums, input_precision="ieee")
    for _ in tl.static_range(3):
        part = x.to(y.dtype)
        sums = tl.dot(part, y, sums)
        x -= part.to(x.dtype)
    return sums


@triton.jit
def split_kernel(
    q, k, v, starts, sums, most, weight, scale, cap, k_b, k_h, k_s, v_b, v_h, v_s,
    kv_heads, splits, window,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    SAME: tl.constexpr, CAPPED: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """For GROUP heads of a kv head and a split of the keys they see: Σ e^(s - m) v, m, Σ e^(s - m).

    Tensor cores need powers of two: GROUP, VALUES and SIZE + REST are G or a part of it, E and D
    rounded up. SAME: values are the first SIZE numbers of keys, which are read once.
    """
    groups: tl.constexpr = (G + GROUP - 1) // GROUP
    head, split = tl.program_id(0) // groups, tl.program_id(1)
    b = head // kv_heads
    at = tl.load(starts + b).to(tl.int32)
    g = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
    n, e = tl.arange(0, SIZE), tl.arange(0, VALUES)
    q += (head * G + g[:, None]) * D
    q_Gd = tl.load(q + n[None, :], (g[:, None] < G) & (n[None, :] < D), 0.0)
    if REST:
        r = SIZE + tl.arange(0, REST)
        q_Gr = tl.load(q + r[None, :], (g[:, None] < G) & (r[None, :] < D), 0.0)
    oldest = tl.maximum(at - at % window if CHUNKS else at - window + 1, 0)
    first = oldest // KEYS * KEYS + split * SPLIT
    last = tl.minimum(first + SPLIT, at + 1)
    h = (head % kv_heads).to(tl.int64)
    k += b.to(tl.int64) * k_b + h * k_h
    v += b.to(tl.int64) * v_b + h * v_h
    m_G = tl.full([GROUP], float("-inf"), tl.float32)
    l_G = tl.zeros([GROUP], tl.float32)
    acc_Ge = tl.zeros([GROUP, VALUES], tl.float32)
    for start in range(first, last, KEYS):
        s = start + tl.arange(0, KEYS)
        seen_S = (s < last) & (s >= oldest)
        rows = s.to(tl.int64)[:, None]
        k_Sd = tl.load(k + rows * k_s + n[None, :], seen_S[:, None] & (n[None, :] < D), 0.0)
        s_GS = dot(q_Gd, tl.trans(k_Sd), tl.zeros([GROUP, KEYS], tl.float32))
        if REST:
            k_Sr = tl.load(k + rows * k_s + r[None, :], seen_S[:, None] & (r[None, :] < D), 0.0)
            s_GS = dot(q_Gr, tl.trans(k_Sr), s_GS)
        s_GS *= scale
        if CAPPED:
            s_GS = cap * (1 - 2 / (tl.exp(2 * s_GS / cap) + 1))
        s_GS = tl.where(seen_S[None, :], s_GS, float("-inf"))
        new_G = tl.maximum(m_G, tl.max(s_GS, 1))
        base_G = tl.where(new_G == float("-inf"), 0.0, new_G)
        p_GS = tl.exp(s_GS - base_G[:, None])
        shrink_G = tl.exp(m_G - base_G)
        if SAME:
            v_Se = k_Sd
        else:
            v_Se = tl.load(v + rows * v_s + e[None, :], seen_S[:, None] & (e[None, :] < E), 0.0)
        l_G = l_G * shrink_G + tl.sum(p_GS, 1)
        acc_Ge = dot(p_GS.to(q_Gd.dtype), v_Se, acc_Ge * shrink_G[:, None])
        m_G = new_G
    row_G = (head * splits + split) * G + g
    tl.store(most + row_G, m_G, g < G)
    tl.store(weight + row_G, l_G, g < G)
    at_Ge = row_G.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(sums + at_Ge, acc_Ge, (g[:, None] < G) & (e[None, :] < E))


@triton.jit
def join_kernel(
    sums, most, weight, sinks, out, heads, splits,
    G: tl.constexpr, E: tl.constexpr, VALUES: tl.constexpr, SPLITS: tl.constexpr,
    SUNK: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head, SPLITS at once, for VALUES of its values, and its sink."""
    head = tl.program_id(0)
    p, e = tl.arange(0, SPLITS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    row_P = (head // G * splits + p) * G + head % G
    m_P = tl.full([SPLITS], float("-inf"), tl.float32)
    for first in range(0, splits, SPLITS):
        m_P = tl.maximum(m_P, tl.load(most + row_P + first * G, first + p < splits, float("-inf")))
    m = tl.max(m_P, 0)
    if SUNK:
        sink = tl.load(sinks + head % heads).to(tl.float32)
        m = tl.maximum(m, sink)
    total_P = tl.zeros([SPLITS], tl.float32)
    acc_Pe = tl.zeros([SPLITS, VALUES], tl.float32)
    for first in range(0, splits, SPLITS):
        at_P, within_P = row_P + first * G, first + p < splits
        scale_P = tl.exp(tl.load(most + at_P, within_P, float("-inf")) - m)
        total_P += tl.load(weight + at_P, within_P, 0.0) * scale_P
        at_Pe = at_P.to(tl.int64)[:, None] * E + e[None, :]
        part_Pe = tl.load(sums + at_Pe, within_P[:, None] & (e[None, :] < E), 0.0)
        acc_Pe += part_Pe * scale_P[:, None]
    total = tl.sum(total_P, 0)
    if SUNK:
        total += tl.exp(sink - m)
    z_e = tl.sum(acc_Pe, 0) / total
    tl.store(out + head * E + e, z_e.to(out.dtype.element_ty), e < E)


def block_sizes(
    group: int, size: int, values: int, itemsize: int, *, most: int, same: bool
) -> dict[str, int]:
    """Compile-time sizes of `split_kernel`, at least 16 for tensor cores, and its warps.

    `itemsize`: the larger one of queries and keys. `most` heads per program, with float32 16, since
    its products hold their inputs in registers. `same`: values are the first numbers of keys.
    """
    whole, rest = max(16, triton.next_power_of_2(size)), 0
    if whole > max(256, size):  # as of latents and rotated dimensions
        whole, rest = whole // 2, max(16, triton.next_power_of_2(size - whole // 2))
    padded = max(16, triton.next_power_of_2(values))
    widest, same = max(whole, padded), same and values == whole
    keys = _BLOCK // (widest * itemsize) * (2 if same else 1)
    return {
        "SIZE": whole, "REST": rest, "VALUES": padded, "SAME": same,
        "GROUP": min(max(16, triton.next_power_of_2(group)), most if itemsize == 2 else 16),
        "KEYS": min(64, max(16, keys)),
        "num_warps": 8 if widest > 256 else 4,
    }  # fmt: skip


@cache
def _most_heads(device: torch.device) -> int:
    """Heads of a program: with latents 64 need 180 KiB of shared memory, 16 half of that."""
    if device.type != "cuda":  # interpreted
        return 16
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return 64 if properties["max_shared_mem"] >= 180 << 10 else 16


def attend_one(
    q_BH1d: Tensor, k_BKCd: Tensor, v_BKCe: Tensor, starts_B: Tensor, *, scale: float,
    window: Window | None = None, cap: float | None = None, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`attend` of the token at position `starts[b]` of each sequence: `[B, H, 1, e]`.

    It sees the slots up to its own, or the last `window`, or those of its chunk. Keys and values
    are contiguous in the last axis; values may be the first numbers of keys. The result has the
    dtype of the queries, at most float32; 16-bit products have float32 sums.
    """
    batch, heads, _, size = q_BH1d.shape
    _, kv_heads, slots, values = v_BKCe.shape
    group, most_seen = heads // kv_heads, most_keys(window) or 1 << 30
    q = q_BH1d.contiguous()
    itemsize = max(q.element_size(), k_BKCd.element_size())
    same = k_BKCd.data_ptr() == v_BKCe.data_ptr()
    sizes = block_sizes(group, size, values, itemsize, most=_most_heads(q.device), same=same)
    programs = batch * kv_heads * triton.cdiv(group, sizes["GROUP"])
    seen = min(slots, most_seen + sizes["KEYS"] - 1)  # from the beginning of a block on
    splits = triton.cdiv(seen, _SPLIT)
    shape = (batch, kv_heads, splits, group)
    sums = q.new_empty(*shape, values, dtype=torch.float32)
    most, weight = q.new_empty(2, *shape, dtype=torch.float32)
    split_kernel[(programs, splits)](
        q, k_BKCd, v_BKCe, starts_B, sums, most, weight, scale, cap or 0.0,
        *k_BKCd.stride()[:3], *v_BKCe.stride()[:3], kv_heads, splits, most_seen,
        G=group, D=size, E=values, SPLIT=_SPLIT, CAPPED=cap is not None,
        CHUNKS=isinstance(window, Chunk), **sizes,
    )  # fmt: skip
    out = torch.empty(batch, heads, 1, values, device=q.device, dtype=q.dtype)
    columns = min(128, sizes["VALUES"])
    join_kernel[(batch * heads, triton.cdiv(values, columns))](
        sums, most, weight, sums if sinks_H is None else sinks_H, out, heads, splits,
        G=group, E=values, VALUES=columns, SPLITS=_JOINED, SUNK=sinks_H is not None,
    )  # fmt: skip
    return out
