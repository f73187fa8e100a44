"""Unpacking of bits to bytes, shared by the decoders. Axes: n blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def half(blocks: Tensor, offset: int, like: Tensor) -> Tensor:
    """The half-precision number at byte `offset` of every block, `[n, 1]` in `like`'s dtype."""
    return blocks[:, offset : offset + 2].view(torch.float16).to(like.dtype)


def words(blocks: Tensor, offset: int, count: int) -> Tensor:
    """`count` bytes of every block as int64 `[n, count / 8]`, copied together."""
    words = blocks[:, offset : offset + count]
    # not `contiguous()`, which returns a single block unchanged, possibly misaligned for int64
    return words.clone(memory_format=torch.contiguous_format).view(torch.int64)


def each(byte: int) -> int:
    """The int64 whose eight bytes are all `byte`."""
    return int.from_bytes(bytes([byte] * 8), "little", signed=True)


def halves(words: Tensor) -> Tensor:
    """Nibbles to bytes: int64 `[…, w]` to `[…, 2w]`, all the low nibbles, then all the high."""
    return torch.cat((words, words >> 4), -1).bitwise_and_(each(0x0F))


def quarters(words: Tensor) -> Tensor:
    """Pairs of bits to bytes: int64 `[…, w]` to `[…, 4w]`, all the lowest pairs first."""
    return torch.cat((words, words >> 2, words >> 4, words >> 6), -1).bitwise_and_(each(0x03))


def fifth(bits: Tensor) -> Tensor:
    """Bits to bytes: 4 bytes `[n, 4]` to int64 `[n, 4]` with 0x10 in byte j of word i for bit j.

    Each byte is copied to all eight; the mask leaves bit j in byte j; adding 0x7F carries any
    bit into the top one, which is shifted to the fifth bit's place.
    """
    diagonal = int.from_bytes(bytes(1 << j for j in range(8)), "little", signed=True)
    spread = (bits.to(torch.int64) * each(0x01)).bitwise_and_(diagonal)
    return spread.add_(each(0x7F)).bitwise_right_shift_(3).bitwise_and_(each(0x10))
