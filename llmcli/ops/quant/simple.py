"""Blocks of 32 elements with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Conventions: `decode`."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.ops.quant.bits import fifth, half, halves, words


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
