"""K-quants: blocks of 256 elements in runs with separate scales. Conventions: `decode`."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.ops.quant.bits import each, half, halves, quarters, words


def q2_k(blocks: Tensor, out: Tensor) -> None:
    """x = (d·s)·q - (dmin·m) per run of 16: 16 bytes of s, m | 64 of 2 bits | d | dmin."""
    q = quarters(words(blocks, 16, 64).view(-1, 2, 4))
    d = (blocks[:, :16] & 15).to(out.dtype).mul_(half(blocks, 80, out))
    least = (blocks[:, :16] >> 4).to(out.dtype).mul_(half(blocks, 82, out))
    out.copy_(q.view(torch.uint8).view(out.shape))
    out.view(-1, 16, 16).mul_(d[:, :, None]).sub_(least[:, :, None])


def q3_k(blocks: Tensor, out: Tensor) -> None:
    """x = (d·(s - 32))·(q - 4) per run of 16: 32 bytes of high bits | 64 of 2 bits | 12 of s | d.

    The 12 bytes hold sixteen 6-bit numbers: the nibbles of 8 bytes, then 4 bytes of bit pairs.
    """
    q = quarters(words(blocks, 32, 64).view(-1, 2, 4)).view(-1, 8, 4)
    high = words(blocks, 0, 32)
    for run in range(8):  # bit `run` of byte j belongs to element j of that run
        q[:, run] |= ((high >> run) & each(0x01)) << 2
    pairs = blocks[:, 104:108]
    upper = torch.cat((pairs, pairs >> 2, pairs >> 4, pairs >> 6), 1).bitwise_and_(3)
    scales = (halves(words(blocks, 96, 8)).view(torch.uint8) | upper << 4).view(torch.int8).sub_(32)
    out.copy_(q.view(torch.int8).view(out.shape).sub_(4))
    out.view(-1, 16, 16).mul_(scales.to(out.dtype).mul_(half(blocks, 108, out))[:, :, None])


def q4_k(blocks: Tensor, out: Tensor) -> None:
    """x = (d·s)·q - (dmin·m) per run of 32: d | dmin | 12 bytes of s, m | 128 of nibbles."""
    q = halves(words(blocks, 16, 128).view(-1, 4, 4))
    _scale_min(out.view(-1, 8, 32), q.view(torch.uint8), blocks)


def q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K with fifth bits: d | dmin | 12 bytes of s, m | 32 of high bits | 128 of nibbles."""
    q = halves(words(blocks, 48, 128).view(-1, 4, 4)).view(-1, 8, 4)
    high = words(blocks, 16, 32)
    for run in range(8):  # bit `run` of byte j belongs to element j of that run
        q[:, run] |= ((high >> run) & each(0x01)) << 4
    _scale_min(out.view(-1, 8, 32), q.view(torch.uint8), blocks)


def q6_k(blocks: Tensor, out: Tensor) -> None:
    """x = (d·s)·(q - 32) per run of 16: 128 bytes of low nibbles | 64 of 2 high bits | 16 s | d."""
    q = halves(words(blocks, 0, 128).view(-1, 2, 8)).view(-1, 2, 4, 4)
    high = words(blocks, 128, 64).view(-1, 2, 4)
    for run in range(4):  # bits 2·run, 2·run + 1 of byte j belong to element j of that run
        q[:, :, run] |= ((high >> (2 * run)) & each(0x03)) << 4
    scales = blocks[:, 192:208].view(torch.int8).to(out.dtype).mul_(half(blocks, 208, out))
    out.copy_(q.view(torch.int8).view(out.shape).sub_(32))
    out.view(-1, 16, 16).mul_(scales[:, :, None])


def _scale_min(out: Tensor, q: Tensor, blocks: Tensor) -> None:
    """Fill `out` [n, 8, 32] with (d·s)·q - (dmin·m), s and m unpacked from bytes 4 … 16.

    The 12 bytes hold eight pairs of 6-bit numbers: s0…s3 and m0…m3 in the low bits of bytes 0–3 and
    4–7, s4…s7 and m4…m7 in the nibbles of bytes 8–11 with their upper 2 bits in the former's.
    """
    s, m, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((s & 63, (low & 15) | ((s >> 2) & 48)), 1)
    minima = torch.cat((m & 63, (low >> 4) | ((m >> 2) & 48)), 1)
    d = scales.to(out.dtype).mul_(half(blocks, 0, out))
    least = minima.to(out.dtype).mul_(half(blocks, 2, out))
    out.copy_(q.view(out.shape)).mul_(d[:, :, None]).sub_(least[:, :, None])
