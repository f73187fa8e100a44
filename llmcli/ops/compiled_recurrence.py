"""Recurrent mixers by our C kernels for float32 on a CPU.

Results are bit-identical for any sequences, chunks, threads and processor level. If all B sequences
share the state's memory, they are B consecutive tokens of one sequence (lanes). Axes: B batch, T
tokens, C channels, L taps of the filter, N rows, H heads, K heads of queries and keys, d size of a
query and key, e of a value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmcli.kernels import native, program
from llmcli.ops import compiled

if TYPE_CHECKING:
    from llmcli.ops.recurrence import Inputs

_MOST_TAPS = 8  # of a filter (recurrence.c)

_bits = lru_cache(maxsize=64)(program.bits)


def convolves(x_BTC: Tensor, w_CL: Tensor, ring_BLC: Tensor) -> bool:
    """Whether `convolve` supports it: float32 or bfloat16, with the ring's dtype."""
    return (
        x_BTC.dtype == ring_BLC.dtype
        and x_BTC.dtype in (torch.float32, torch.bfloat16)
        and x_BTC.numel() > 0
        and x_BTC.stride(2) == 1
        and w_CL.shape[1] <= _MOST_TAPS
        and ring_BLC[0].is_contiguous()
        and compiled.runs(x_BTC)
    )


def convolve(
    x_BTC: Tensor, w_CL: Tensor, b_C: Tensor | None, ring_BLC: Tensor, starts: Tensor, *,
    silu: bool, lengths_B: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See `ops.conv.causal_conv_chunk`: the sums and (with `silu`) their SiLU, in float32.

    The first token of sequence b is at position `starts[b]`; a single start applies to all
    sequences. The ring stores `lengths[b]` tokens, by default all.
    """
    batch, tokens, channels = x_BTC.shape
    w_CL, b_C = w_CL.float().contiguous(), None if b_C is None else b_C.float()
    lanes = batch > 1 and ring_BLC.stride(0) == 0
    out = torch.empty(batch, tokens, channels)
    act = torch.empty_like(out) if silu else None
    shape = (0, x_BTC.stride(0)) if lanes else x_BTC.stride()[:2]
    op = (
        program.CONVOLVE, x_BTC.data_ptr(), *shape, ring_BLC.data_ptr(), w_CL.data_ptr(),
        0 if b_C is None else b_C.data_ptr(), out.data_ptr(), 0 if act is None else act.data_ptr(),
        *((1, batch) if lanes else (batch, tokens)), channels, w_CL.shape[1],
        x_BTC.dtype == torch.float32, starts.data_ptr(), len(starts) > 1,
        0 if lengths_B is None else lengths_B.data_ptr(),
    )  # fmt: skip
    program.run(
        torch.get_num_threads(), op, reads=(x_BTC, w_CL, b_C, starts, lengths_B),
        writes=(ring_BLC, out) if act is None else (ring_BLC, out, act),
    )  # fmt: skip
    return out, act


def unit(x_BTNd: Tensor, eps: float, factor: float) -> Tensor:
    """See `ops.norm.l2_norm`, times a `factor`."""
    batch, tokens, rows, size = x_BTNd.shape
    x_BTNd, far = compiled.evenly_spaced(x_BTNd)
    out = torch.empty(x_BTNd.shape)
    op = (
        program.UNIT, x_BTNd.data_ptr(), far, out.data_ptr(), batch * tokens, rows, size,
        _bits(eps), _bits(factor),
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(x_BTNd,), writes=(out,))
    return out


def decay(
    x: Tensor, bias_H: Tensor, rate_H: Tensor, least: float, most: float
) -> tuple[Tensor, Tensor]:
    """`clip(softplus(x + bias), least, most)`, and that times `-e^rate`: `[…, H]` each."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    steps, logs = torch.empty(x.shape), torch.empty(x.shape)
    op = (
        program.DECAY, rows.data_ptr(), rows.stride(0), bias_H.data_ptr(), rate_H.data_ptr(),
        steps.data_ptr(), logs.data_ptr(), *rows.shape, _bits(least), _bits(most),
    )  # fmt: skip
    program.run(
        torch.get_num_threads(), op, reads=(rows, bias_H, rate_H), writes=(steps, logs)
    )  # fmt: skip
    return steps, logs


def recurs(x: Inputs, state_BHde: Tensor) -> bool:
    """Whether `recur` supports it: inputs and state in float32.

    Many tokens only with a processor level: without, each fused multiply-add is a function call.
    """
    return (
        (x.tokens == 1 or native.level() != "portable")
        and all(map(compiled.takes, (x.q_BKTd, x.k_BKTd, x.v_BHTe, x.beta_BHT, x.log_decay_BHT)))
        and state_BHde.dtype == torch.float32
        and state_BHde[0].is_contiguous()
    )


def recur(x: Inputs, state_BHde: Tensor) -> Tensor:
    """See `ops.recurrence.recur_steps`: `[B, H, T, e]`, with each token's heads contiguous."""
    batch, heads, tokens, values = x.v_BHTe.shape
    q, k, v = (_together(one) for one in (x.q_BKTd, x.k_BKTd, x.v_BHTe))
    beta, log_decay = x.beta_BHT.mT.contiguous(), x.log_decay_BHT.mT.contiguous()
    out_BTHe = torch.empty(batch, tokens, heads, values)
    lanes = batch > 1 and state_BHde.stride(0) == 0
    # strides of sequences and tokens of each
    far = [(0, one.stride(0)) if lanes else (one.stride(0), one.stride(2)) for one in (q, k, v)]
    op = (
        program.RECUR, q.data_ptr(), *far[0], k.data_ptr(), *far[1], v.data_ptr(), *far[2],
        state_BHde.data_ptr(), *((1, batch) if lanes else (batch, tokens)), heads, q.shape[1],
        q.shape[3], values, beta.data_ptr(), log_decay.data_ptr(), out_BTHe.data_ptr(), x.plain,
        x.tiled,
    )  # fmt: skip
    program.run(
        torch.get_num_threads(), op, reads=(q, k, v, beta, log_decay),
        writes=(state_BHde, out_BTHe),
    )  # fmt: skip
    return out_BTHe.transpose(1, 2)


def add_scaled(z_BH1e: Tensor, x_BH1e: Tensor, factor_H: Tensor) -> Tensor:
    """`z + f x`, with one factor f per head."""
    batch, heads, _, size = z_BH1e.shape
    z_BH1e, x_BH1e = z_BH1e.contiguous(), _together(x_BH1e)
    out = torch.empty(batch, heads, 1, size)
    op = (
        program.ADD_SCALED, z_BH1e.data_ptr(), x_BH1e.data_ptr(), x_BH1e.stride(0),
        factor_H.data_ptr(), out.data_ptr(), batch, heads, size,
    )  # fmt: skip
    program.run(
        torch.get_num_threads(), op, reads=(z_BH1e, x_BH1e, factor_H), writes=(out,)
    )
    return out


def _together(x_BNTd: Tensor) -> Tensor:
    """`x` with each token's heads contiguous."""
    _, rows, _, size = x_BNTd.shape
    together = x_BNTd.stride(3) == 1 and (rows == 1 or x_BNTd.stride(1) == size)
    return x_BNTd if together else x_BNTd.transpose(1, 2).contiguous().transpose(1, 2)
