"""Blocks with one scale: of 32 elements (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0), of 256 that are -1, 0 or 1
(TQ1_0, TQ2_0); and 8-bit floats. Conventions: `decode`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from llmcli.ops.quant.bits import fifth, half, halves, quarters, words


def q4_0(blocks: Tensor, out: Tensor) -> None:
    """x = d·(q - 8): d | 16 bytes of nibbles."""
    q = halves(words(blocks, 2, 16)).view(torch.int8).sub_(8)
    out.copy_(q).mul_(half(blocks, 0, out))


def q4_1(blocks: Tensor, out: Tensor) -> None:
    """x = d·q + m: d | m | 16 bytes of nibbles."""
    q = halves(words(blocks, 4, 16)).view(torch.uint8)
    out.copy_(q).mul_(half(blocks, 0, out)).add_(half(blocks, 2, out))


def q5_0(blocks: Tensor, out: Tensor) -> None:
    """x = d·(q - 16): d | 32 fifth bits | 16 bytes of nibbles."""
    q = halves(words(blocks, 6, 16)).bitwise_or_(fifth(blocks[:, 2:6]))
    out.copy_(q.view(torch.int8).sub_(16)).mul_(half(blocks, 0, out))


def q5_1(blocks: Tensor, out: Tensor) -> None:
    """x = d·q + m: d | m | 32 fifth bits | 16 bytes of nibbles."""
    q = halves(words(blocks, 8, 16)).bitwise_or_(fifth(blocks[:, 4:8]))
    out.copy_(q.view(torch.uint8)).mul_(half(blocks, 0, out)).add_(half(blocks, 2, out))


def q8_0(blocks: Tensor, out: Tensor) -> None:
    """x = d·q: d | 32 signed bytes."""
    out.copy_(words(blocks, 2, 32).view(torch.int8)).mul_(half(blocks, 0, out))


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


def e4m3(blocks: Tensor, out: Tensor) -> None:
    """E4M3 (uint8 `[n, 1]`) into `out` `[n, 1]` of float32 or float64, exactly, by a table.

    PyTorch converts one number at a time: on a CPU this is 3.8 times as fast on one thread, 2.2
    times on two. Source: arXiv 2209.05433 (Micikevicius et al. 2022), section 3.1: no infinities,
    two NaN.
    """
    torch.index_select(_table(out.dtype), 0, blocks.view(-1).int(), out=out.view(-1))


@lru_cache(maxsize=2)
def _table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
