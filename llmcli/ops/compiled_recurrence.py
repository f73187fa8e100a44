"""Recurrent mixers by our C kernels for float32 on a CPU.

Results are bit-identical for any sequences, chunks, threads and processor level. If all B sequences
share the state's memory, they are B consecutive tokens of one sequence (lanes). Axes: B batch, T
tokens, C channels, L taps of the filter, N rows, H heads, K heads of queries and keys, d size of a
query and key, e of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmcli.kernels import native, program
from llmcli.kernels.program import call
from llmcli.ops import compiled

if TYPE_CHECKING:
    from llmcli.ops.recurrence import Inputs

_MOST_TAPS = 8  # of a filter (recurrence.c)


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
    call(
        program.CONVOLVE, x_BTC, *shape, ring_BLC, w_CL, b_C, out, act,
        *((1, batch) if lanes else (batch, tokens)), channels, w_CL.shape[1],
        x_BTC.dtype == torch.float32, starts, len(starts) > 1, lengths_B, out=out,
        writes=(ring_BLC,) if act is None else (ring_BLC, act),
    )  # fmt: skip
    return out, act


def recurs(x: Inputs, state_BHde: Tensor) -> bool:
    """Whether `recur` supports it: inputs and state in float32.

    Many tokens only with a processor level: without, each fused multiply-add is a function call.
    """
    return (
        (x.tokens == 1 or native.level() != "portable")
        and compiled.takes(x.q_BKTd, x.k_BKTd, x.v_BHTe, x.beta_BHT, x.log_decay_BHT)
        and state_BHde.dtype == torch.float32
        and state_BHde[0].is_contiguous()
    )


def recur(x: Inputs, state_BHde: Tensor) -> Tensor:
    """See `ops.recurrence.recur_steps`: `[B, H, T, e]`, with each token's heads contiguous."""
    batch, heads, tokens, values = x.v_BHTe.shape
    q, k, v = (heads_together(one) for one in (x.q_BKTd, x.k_BKTd, x.v_BHTe))
    beta, log_decay = x.beta_BHT.mT.contiguous(), x.log_decay_BHT.mT.contiguous()
    out_BTHe = torch.empty(batch, tokens, heads, values)
    lanes = batch > 1 and state_BHde.stride(0) == 0
    # strides of sequences and tokens of each
    far = [(0, one.stride(0)) if lanes else (one.stride(0), one.stride(2)) for one in (q, k, v)]
    return call(
        program.RECUR, q, *far[0], k, *far[1], v, *far[2], state_BHde,
        *((1, batch) if lanes else (batch, tokens)), heads, q.shape[1], q.shape[3], values, beta,
        log_decay, out_BTHe, x.plain, x.tiled, out=out_BTHe, writes=(state_BHde,),
    ).transpose(1, 2)  # fmt: skip


def heads_together(x_BNTd: Tensor) -> Tensor:
    """`x` with each token's heads contiguous."""
    _, rows, _, size = x_BNTd.shape
    together = x_BNTd.stride(3) == 1 and (rows == 1 or x_BNTd.stride(1) == size)
    return x_BNTd if together else x_BNTd.transpose(1, 2).contiguous().transpose(1, 2)
