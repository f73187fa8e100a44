"""4-bit codes that index a table: MXFP4, NVFP4, IQ4_NL, IQ4_XS. Conventions: `decode`.

MXFP4 and NVFP4 hold 4-bit floats (sign, two bits of exponent, one of mantissa; OCP's
Microscaling Formats 1.0) whose values are doubled to be integers; the scale is halved.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from llmcli.ops.quant.bits import half, halves, words

# Twice the value of a 4-bit float. Code 8 is 0, not -0: ggml stores integers.
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# ggml's non-linear steps, finer around zero.
_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def mxfp4(blocks: Tensor, out: Tensor) -> None:
    """x = 2^(e-128)·v(q): e of 8 bits | 16 bytes of nibbles."""
    codes = _values(halves(words(blocks, 1, 16)), _FP4)
    scale = _powers_of_two(out.device).index_select(0, blocks[:, 0].to(torch.int32))
    out.copy_(codes).mul_(scale.to(out.dtype)[:, None])


def nvfp4(blocks: Tensor, out: Tensor) -> None:
    """x = d·v(q) per run of 16: 4 d of 8 bits | 4 times 8 bytes of nibbles."""
    codes = _values(halves(words(blocks, 4, 32).view(-1, 4, 1)), _FP4)
    scale = _e4m3(out.device).index_select(0, blocks[:, :4].reshape(-1).to(torch.int32))
    out.copy_(codes.view(out.shape))
    out.view(-1, 16).mul_(scale.to(out.dtype)[:, None])


def iq4_nl(blocks: Tensor, out: Tensor) -> None:
    """x = d·v(q): d | 16 bytes of nibbles."""
    out.copy_(_values(halves(words(blocks, 2, 16)), _NL)).mul_(half(blocks, 0, out))


def iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """x = d·(s - 32)·v(q) per run of 32: d | 8 high bits of s | 4 bytes of low | 128 of nibbles."""
    codes = _values(halves(words(blocks, 8, 128).view(-1, 8, 2)), _NL)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).view(-1, 8)
    bits = torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device)
    high = (blocks[:, 2:4].view(torch.int16).to(torch.int32) >> bits) & 3
    scale = ((high << 4 | low) - 32).to(out.dtype).mul_(half(blocks, 0, out))
    out.copy_(codes.view(out.shape))
    out.view(-1, 8, 32).mul_(scale[:, :, None])


def _values(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    """Bytes of 0 … 15 in int64 `[n, …, w]` to int8 `[n, 8·w·…]`, looked up two at a time."""
    table = _pairs(values, codes.device)
    index = codes.view(torch.int16).view(-1).to(torch.int32)
    return table.index_select(0, index).view(torch.int8).view(codes.shape[0], -1)


@cache
def _pairs(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int16 `[16 · 256]`: at `low | high << 8`, the values of both codes in this order."""
    wide = torch.zeros(16, 256, 2, dtype=torch.int8)
    wide[:, :16, 0] = torch.tensor(values, dtype=torch.int8)
    wide[:, :16, 1] = torch.tensor(values, dtype=torch.int8)[:, None]
    return wide.view(-1).view(torch.int16).to(device)


@cache
def _powers_of_two(device: torch.device) -> Tensor:
    """float32 `[256]`: 2^(e-128), the smallest of them denormal."""
    values = [2.0 ** (e - 128) for e in range(256)]
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def _e4m3(device: torch.device) -> Tensor:
    """float32 `[256]`: half of an unsigned 8-bit float of 4 bits of exponent and 3 of mantissa.

    As in ggml: the sign is ignored, and 0x7F is 0 instead of NaN.
    """
    values = []
    for x in range(256):
        exponent, mantissa = x >> 3 & 15, x & 7
        normal = (8 + mantissa) * 2.0 ** (exponent - 11)
        values.append(0.0 if x == 0x7F else normal if exponent else mantissa / 1024)
    return torch.tensor(values, dtype=torch.float32, device=device)
