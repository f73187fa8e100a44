"""The causal depthwise convolution before a recurrence (Mamba-2, gated DeltaNet).

    y[t] = b + w[k-1] x[t] + w[k-2] x[t-1] + … + w[0] x[t-k+1]          per channel, x[<0] = 0

The weights have the order of the checkpoint and PyTorch's `conv1d`: w[k-1] applies to the current
input. (Textbooks use the reverse order.)

    whole sequence                 causal_conv(x, w, b)
    chunk after chunk, or a token  convolve(x, w, b, ring, positions)

All give the same numbers, and may alternate. Sums are in at least float32, the result has the dtype
of the input. Shapes do not depend on the data, and the ring is updated in place.

A ring `[B, k, C]` begins as zeros and has the input at position p in slot p % k. It has one slot
more than the R past inputs: the current input is written first, and a step is one weighted sum of
all slots.

Axes: B batch, T tokens, C channels, k taps of the filter (2 to 4 in practice), R = k - 1 inputs
of the past. Tokens come before channels, as in the adjacent projections.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.kernels import program
from llmcli.kernels.program import call
from llmcli.ops import compiled
from llmcli.ops.norm import at_least_float32

_MOST_TAPS = 8  # of a filter by our kernel (recurrence.c)


def convolve(
    x_BTC: Tensor, w_Ck: Tensor, b_C: Tensor | None, ring_BkC: Tensor, positions_B: Tensor, *,
    lengths_B: Tensor | None = None, silu: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`causal_conv` of the next T tokens of sequences with the past in `ring_BkC`; updates it.

    Also its SiLU in float32, if requested and our kernel computes both together. `positions_B`
    (int64): position of each sequence's first token, or one for all. `lengths_B`: number of valid
    tokens (0 … T); the rest is padding on the right, whose results are undefined and which is not
    stored in the ring. None: all.
    """
    if has_kernel(x_BTC, w_Ck, ring_BkC):
        wide_BTC, act_BTC = by_kernel(
            x_BTC, w_Ck, b_C, ring_BkC, positions_B, lengths_B=lengths_B, silu=silu
        )
        return wide_BTC.to(x_BTC.dtype), act_BTC
    positions_B = positions_B.to(x_BTC.device).expand(len(x_BTC))
    return causal_conv_chunk(x_BTC, w_Ck, b_C, ring_BkC, positions_B, lengths_B), None


def causal_conv(
    x_BTC: Tensor, w_Ck: Tensor, b_C: Tensor | None = None, past_BRC: Tensor | None = None
) -> Tensor:
    """The convolution over a sequence: `[B, T, C]` → `[B, T, C]`.

    `past_BRC`: the R inputs before `x`, oldest first; None: zeros. Computed as a sum of k shifted
    products, since `conv1d` needs the channels first and takes four times as long (512 × 6144
    float32, k = 4, 2 cores: 18 ms against 4).
    """
    tokens = x_BTC.shape[1]
    w_kC = at_least_float32(w_Ck).t()
    taps = w_kC.shape[0]
    if past_BRC is None:
        padded_BSC = F.pad(x_BTC, (0, 0, taps - 1, 0))
    else:
        padded_BSC = torch.cat((past_BRC, x_BTC), 1)
    padded_BSC = at_least_float32(padded_BSC)
    y_BTC = padded_BSC[:, :tokens] * w_kC[0]
    for i in range(1, taps):
        y_BTC.addcmul_(padded_BSC[:, i : i + tokens], w_kC[i])
    return (y_BTC if b_C is None else y_BTC.add_(b_C)).to(x_BTC.dtype)


def causal_conv_chunk(
    x_BTC: Tensor, w_Ck: Tensor, b_C: Tensor | None, ring_BkC: Tensor, positions_B: Tensor,
    lengths_B: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`convolve` by PyTorch; one valid token of each sequence is a weighted sum of all slots.

    The input in slot j has age (p - j) mod k and weight w[k - 1 - age]: weights rotate, inputs
    stay.
    """
    batch, tokens, _ = x_BTC.shape
    taps = w_Ck.shape[1]
    if tokens > 1 or lengths_B is not None:
        y_BTC = causal_conv(x_BTC, w_Ck, b_C, _read(ring_BkC, positions_B))
        ends_B = positions_B + (tokens if lengths_B is None else lengths_B)
        _write(ring_BkC, x_BTC, positions_B, ends_B)
        return y_BTC
    rows_B = torch.arange(batch, device=positions_B.device)
    ring_BkC.index_put_((rows_B, positions_B % taps), x_BTC[:, 0])
    slot_k = torch.arange(taps, device=positions_B.device)
    turned_BkC = at_least_float32(w_Ck).t()[(slot_k - positions_B[:, None] - 1) % taps]
    y_BC = (ring_BkC * turned_BkC).sum(1)
    return (y_BC if b_C is None else y_BC.add_(b_C)).to(x_BTC.dtype).unsqueeze(1)


def has_kernel(x_BTC: Tensor, w_Ck: Tensor, ring_BkC: Tensor) -> bool:
    """Whether `by_kernel` supports it: float32 or bfloat16, with the ring's dtype."""
    return (
        x_BTC.dtype == ring_BkC.dtype
        and x_BTC.dtype in (torch.float32, torch.bfloat16)
        and x_BTC.numel() > 0
        and x_BTC.stride(2) == 1
        and w_Ck.shape[1] <= _MOST_TAPS
        and ring_BkC[0].is_contiguous()
        and compiled.runs(x_BTC)
    )


def by_kernel(
    x_BTC: Tensor, w_Ck: Tensor, b_C: Tensor | None, ring_BkC: Tensor, starts: Tensor, *,
    lengths_B: Tensor | None = None, silu: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`convolve` by our kernel: the sums and (with `silu`) their SiLU, in float32.

    Results are bit-identical for any sequences, chunks, threads and processor level. If all
    sequences share the ring's memory, they are B consecutive tokens of one sequence (lanes).
    """
    out = torch.empty(x_BTC.shape)
    act = torch.empty_like(out) if silu else None
    w_Ck, b_C = w_Ck.float().contiguous(), None if b_C is None else b_C.float()
    if len(x_BTC) > 1 and ring_BkC.stride(0) == 0:  # lanes
        x_BTC = x_BTC.transpose(0, 1)
    rows = x_BTC, *x_BTC.stride()[:2], ring_BkC, w_Ck, b_C, out, act
    shape = *x_BTC.shape, w_Ck.shape[1], x_BTC.dtype == torch.float32
    written = (ring_BkC,) if act is None else (ring_BkC, act)
    starting = starts, len(starts) > 1, lengths_B
    call(program.CONVOLVE, *rows, *shape, *starting, out=out, writes=written)
    return out, act


def _read(ring_BkC: Tensor, positions_B: Tensor) -> Tensor:
    """The R inputs before `positions_B`, oldest first: `[B, R, C]`."""
    taps = ring_BkC.shape[1]
    before_R = torch.arange(1 - taps, 0, device=positions_B.device)
    slots_BR = (positions_B[:, None] + before_R) % taps
    rows_B1 = torch.arange(ring_BkC.shape[0], device=positions_B.device)[:, None]
    return ring_BkC[rows_B1, slots_BR]


def _write(ring_BkC: Tensor, x_BTC: Tensor, starts_B: Tensor, ends_B: Tensor) -> None:
    """Write the inputs at positions `starts_B` … `ends_B` - 1 into their slots; latest wins."""
    taps = ring_BkC.shape[1]
    slot_k = torch.arange(taps, device=starts_B.device)
    last_B1 = ends_B[:, None] - 1
    newest_Bk = last_B1 - (last_B1 - slot_k) % taps  # the latest position of each slot
    index_Bk = newest_Bk - starts_B[:, None]
    rows_B1 = torch.arange(ring_BkC.shape[0], device=starts_B.device)[:, None]
    found_BkC = x_BTC[rows_B1, index_Bk.clamp(min=0)]
    ring_BkC.copy_(torch.where(index_Bk[:, :, None] >= 0, found_BkC, ring_BkC))
