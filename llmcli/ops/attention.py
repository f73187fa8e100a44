"""Softmax attention on given queries, keys and values.

Axes: B batch, H heads, K key/value heads, G = H/K heads that share one, T queries, S keys,
d size of a head's query and key, e of its value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.config.attention import Window, first_key
from llmcli.ops import compiled
from llmcli.ops.activations import soft_cap
from llmcli.ops.product import batched_factor, batched_product


def attend(
    q_BHTd: Tensor,
    k_BKSd: Tensor,
    v_BKSe: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
    slopes_H: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """`softmax(scale · Q Kᵀ + M) V` → `[B, H, T, e]`, with PyTorch's fused kernel.

    `cap`, `slopes_H` with the queries' `positions`, and `sinks_H`: see `scores` and `weights`;
    without a fused kernel, these are computed in blocks of queries.

    The arithmetic has the dtype of the queries, or float32 if that is `compiled.EMULATED`; narrower
    keys and values are widened. The softmax has at least float32; 16-bit values are multiplied with
    16-bit weights, on a CPU only by the fused kernel.

    `causal` hides keys after the query's own index (T = S); `mask` `[T, S]` or `[B, 1, T, S]`
    is True where a key is visible. With neither, every query sees every key.
    """
    if cap is not None or sinks_H is not None or slopes_H is not None:
        return _attend_in_blocks(
            q_BHTd, k_BKSd, v_BKSe, scale, causal, mask, cap, sinks_H, slopes_H, positions
        )
    heads, kv_heads = q_BHTd.shape[1], k_BKSd.shape[1]
    dtype = q_BHTd.dtype
    if dtype in compiled.EMULATED and compiled.runs(q_BHTd):
        q_BHTd = q_BHTd.float()
    k_BKSd, v_BKSe = k_BKSd.to(q_BHTd.dtype), v_BKSe.to(q_BHTd.dtype)
    # with a mask the CPU kernel supports grouped heads, CUDA's fused kernels do not
    if q_BHTd.shape[2] == 1 and (mask is None or q_BHTd.is_cuda):
        return _attend_one(q_BHTd, k_BKSd, v_BKSe, scale, mask).to(dtype)
    if mask is not None and heads != kv_heads and q_BHTd.is_cuda:
        k_BKSd, v_BKSe = (x.repeat_interleave(heads // kv_heads, 1) for x in (k_BKSd, v_BKSe))
        kv_heads = heads
    values = v_BKSe.shape[-1]
    if q_BHTd.device.type == "cpu":
        q_BHTd, k_BKSd, v_BKSe = _of_one_size(q_BHTd, k_BKSd, v_BKSe)
    z_BHTe = F.scaled_dot_product_attention(
        q_BHTd,
        k_BKSd,
        v_BKSe,
        attn_mask=mask,
        is_causal=causal and q_BHTd.shape[2] > 1,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return (z_BHTe if z_BHTe.shape[-1] == values else z_BHTe[..., :values]).to(dtype)


def _of_one_size(*tensors: Tensor) -> list[Tensor]:
    """Zero-pad the last axis to a common size, which changes no score and no sum.

    The CPU's fused kernel needs queries, keys and values of one size; otherwise the scores of all
    heads would be stored, and a row would depend on the other rows.
    """
    most = max(one.shape[-1] for one in tensors)
    return [
        one if one.shape[-1] == most else F.pad(one, (0, most - one.shape[-1])) for one in tensors
    ]


def _attend_one(
    q_BHTd: Tensor, k_BKSd: Tensor, v_BKSe: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """One query per head: the G heads of a group, which share keys, become rows of one query.

    Keys are not repeated; without a mask, on a CPU it takes a quarter of the time of `enable_gqa`
    (bf16, 160 keys), and on CUDA fused kernels stay available.
    """
    batch, heads, _, size = q_BHTd.shape
    kv_heads = k_BKSd.shape[1]
    q_BKGd = q_BHTd.reshape(batch, kv_heads, heads // kv_heads, size)
    z_BKGe = F.scaled_dot_product_attention(q_BKGd, k_BKSd, v_BKSe, attn_mask=mask, scale=scale)
    return z_BKGe.reshape(batch, heads, 1, v_BKSe.shape[-1])


_QUERIES = 256  # per block


def _attend_in_blocks(
    q_BHTd: Tensor, k_BKSd: Tensor, v_BKSe: Tensor, scale: float, causal: bool,
    mask: Tensor | None, cap: float | None, sinks_H: Tensor | None, slopes_H: Tensor | None,
    positions: Tensor | None,
) -> Tensor:  # fmt: skip
    tokens, keys = q_BHTd.shape[2], k_BKSd.shape[2]
    if mask is None:  # every query sees the last key, or those up to its own
        first = 0 if causal else keys - 1
        at_T = torch.arange(first, first + tokens, device=q_BHTd.device)
        mask = visible_keys(at_T, keys, None)
    v_BNSe = _of_heads(v_BKSe, q_BHTd)
    parts = []
    for first in range(0, tokens, _QUERIES):
        rows = slice(first, first + _QUERIES)
        q_BHtd, seen = q_BHTd[:, :, rows], mask[..., rows, :]
        at = None if positions is None else positions[..., rows]
        found = scores(q_BHtd, k_BKSd, seen, scale=scale, cap=cap, slopes_H=slopes_H, positions=at)
        parts.append(_product(weights(found, sinks_H), v_BNSe).to(q_BHTd.dtype))
    return torch.cat(parts, 2)


def scores(
    q_BHtd: Tensor, k_BKSd: Tensor, visible: Tensor, *, scale: float, cap: float | None = None,
    slopes_H: Tensor | None = None, positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`scale · Q Kᵀ`, -∞ where `visible` is False: `[B, H, t, S]` in at least float32.

    With a `cap` c a score s is `c · tanh(s / c)` (Gemma 2). `slopes_H` times the distance of each
    key from the query, at one of `positions` `[t]` or `[B, t]`, is taken off its score (ALiBi).
    """
    k_BNSd = _of_heads(k_BKSd, q_BHtd)
    raw_BHtS = _product(q_BHtd, k_BNSd.transpose(-1, -2)) * scale
    if slopes_H is not None:
        assert positions is not None
        key_S = torch.arange(k_BKSd.shape[2], device=positions.device)
        distance_1tS = (positions.unsqueeze(-1) - key_S).unsqueeze(-3)  # [1, t, S] or [B, 1, t, S]
        raw_BHtS = raw_BHtS - slopes_H.to(raw_BHtS.dtype).view(-1, 1, 1) * distance_1tS
    if cap is not None:
        raw_BHtS = soft_cap(raw_BHtS, cap)
    return raw_BHtS.masked_fill(~visible, -torch.inf)


def _of_heads(x_BKSd: Tensor, q_BHtd: Tensor) -> Tensor:
    """Keys or values for `_product`: repeated for every head, but on CUDA one per group."""
    x_BKSd = batched_factor(x_BKSd, q_BHtd.dtype)
    if x_BKSd.is_cuda:
        return x_BKSd
    return x_BKSd.repeat_interleave(q_BHtd.shape[1] // x_BKSd.shape[1], dim=1)


def _product(x_BHtn: Tensor, y_BNnm: Tensor) -> Tensor:
    """`X Y`, `[B, H, t, m]`, with N matrices, each for H/N heads (see `_of_heads`)."""
    if not y_BNnm.is_cuda:
        return batched_product(x_BHtn, y_BNnm)
    x_BNMn = x_BHtn.reshape(*y_BNnm.shape[:2], -1, x_BHtn.shape[-1])
    found = batched_product(x_BNMn.flatten(0, 1), y_BNnm.flatten(0, 1))
    return found.view(*x_BHtn.shape[:-1], -1)


def weights(scores_BHtS: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """The softmax of every row.

    A head's sink is an additional score without a value: weights sum to less than 1 (gpt-oss).
    """
    if sinks_H is None:
        return scores_BHtS.softmax(-1)
    sinks_BHt1 = sinks_H.to(scores_BHtS.dtype).view(-1, 1, 1).expand(*scores_BHtS.shape[:-1], 1)
    return torch.cat((scores_BHtS, sinks_BHt1), -1).softmax(-1)[..., :-1]


def visible_keys(positions_T: Tensor, keys: int, window: Window | None, before: int = 0) -> Tensor:
    """Mask of the `keys` keys from `before` on that a query at each position sees: `[..., T, S]`.

    A query at position p sees keys up to p, with a window from its first one on.
    """
    key_S = torch.arange(before, before + keys, device=positions_T.device)
    at = positions_T.unsqueeze(-1)
    seen = key_S <= at
    return seen if window is None else seen & (key_S >= first_key(at, window))
