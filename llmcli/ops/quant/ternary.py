"""Blocks of 256 elements of -1, 0 and 1: TQ1_0 and TQ2_0. Conventions: `decode`."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.ops.quant.bits import half, quarters, words


def tq1_0(blocks: Tensor, out: Tensor) -> None:
    """x = d·(t - 1): 32 bytes of 5 digits t | 16 bytes of 5 | 4 bytes of 4 | d.

    A byte is a fraction of 256 in base three: three times the byte has the first digit above its
    eight bits, and the other digits below. Digit i of byte j is element j of run i.
    """
    left = torch.empty(5, len(blocks), 52, dtype=torch.uint8, device=blocks.device)
    left[0] = blocks[:, :52]
    for digit in range(4):
        torch.mul(left[digit], 3, out=left[digit + 1])
    parts = ((range(5), slice(32)), (range(5), slice(32, 48)), (range(4), slice(48, 52)))
    order = torch.cat([left[digit, :, part] for digits, part in parts for digit in digits], 1)
    t = order.to(torch.int16).mul_(3).bitwise_right_shift_(8).sub_(1)
    out.copy_(t).mul_(half(blocks, 52, out))


def tq2_0(blocks: Tensor, out: Tensor) -> None:
    """x = d·(q - 1): 64 bytes of 2 bits | d."""
    q = quarters(words(blocks, 0, 64).view(-1, 2, 4))
    out.copy_(q.view(torch.int8).view(out.shape).sub_(1)).mul_(half(blocks, 64, out))
