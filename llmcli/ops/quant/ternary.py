"""Blocks of 256 elements of -1, 0 and 1: TQ1_0 and TQ2_0. Rules: `decode`."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.ops.quant.bits import half, quarters, words


def tq1_0(blocks: Tensor, out: Tensor) -> None:
    """x = d·(t - 1): 32 bytes of 5 digits t | 16 bytes of 5 | 4 bytes of 4 | d.

    A byte is a fraction of 256 in base three: digit i + 1 is digit 1 of what three times the
    byte leaves of its eight bits. Digit i of byte j is element j of run i.
    """
    n = len(blocks)
    left = torch.empty(5, n, 52, dtype=torch.uint8, device=blocks.device)
    left[0] = blocks[:, :52]
    for digit in range(4):
        torch.mul(left[digit], 3, out=left[digit + 1])
    # the digit is 0 below a third of 256, and 2 from two thirds
    t = (left >= 86).view(torch.int8) - (left < 171).view(torch.int8)
    out[:, :160].view(n, 5, 32).copy_(t[:, :, :32].transpose(0, 1))
    out[:, 160:240].view(n, 5, 16).copy_(t[:, :, 32:48].transpose(0, 1))
    out[:, 240:].view(n, 4, 4).copy_(t[:4, :, 48:].transpose(0, 1))
    out.mul_(half(blocks, 52, out))


def tq2_0(blocks: Tensor, out: Tensor) -> None:
    """x = d·(q - 1): 64 bytes of 2 bits | d."""
    q = quarters(words(blocks, 0, 64).view(-1, 2, 4))
    out.copy_(q.view(torch.int8).view(out.shape).sub_(1)).mul_(half(blocks, 64, out))
