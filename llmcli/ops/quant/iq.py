"""Blocks of 256 elements by grids (`grids`): IQ2, IQ3 and IQ1 formats.

Conventions: `decode`. A scale has at most 16 significant bits and a grid value 6: products are
exact in float32 in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.ops.quant.bits import half, words
from llmcli.ops.quant.grids import grid, negate, parity_signs, shifted_grid, signed_grid, signs


def iq2_xxs(blocks: Tensor, out: Tensor) -> None:
    """x = d·(s + ½)/4·g per run of 32: d | 8 times 4 indices, 4·7 bits of sign, 4 bits of s."""
    runs = words(blocks, 2, 64)
    tail = runs.view(torch.int32).view(-1, 8, 2)[:, :, 1:]
    index = (_shifted(tail, 7, 4) & 127) << 8
    index |= runs.view(torch.uint8).view(-1, 8, 8)[:, :, :4]
    q = signed_grid("IQ2_XXS", out.device).index_select(0, index.view(-1))
    scale = ((tail >> 28) & 15).to(out.dtype).add_(0.5).mul_(0.25)
    _scaled(out, q, scale.view(-1, 8).mul_(half(blocks, 0, out)))


def iq2_xs(blocks: Tensor, out: Tensor) -> None:
    """x = d·(s + ½)/4·g per run of 16: d | 32 times 9 bits of index, 7 of sign | 16 s of 4 bits."""
    index = words(blocks, 2, 64).view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    q = signed_grid("IQ2_XS", out.device).index_select(0, index.view(-1))
    _scaled(out, q, _nibbles(blocks[:, 66:74], out, 0.5).mul_(0.25).mul_(half(blocks, 0, out)))


def iq2_s(blocks: Tensor, out: Tensor) -> None:
    """As IQ2_XS: d | 32 bytes of index | 32 of sign | 8 of two high bits of index | 16 s."""
    index = (_shifted(blocks[:, 66:74, None].to(torch.int32), 2, 4) & 3) << 8
    index = index.view(-1, 32) | blocks[:, 2:34]
    sign = signs(out.device).index_select(0, blocks[:, 34:66].to(torch.int32).view(-1))
    q = negate(grid("IQ2_S", out.device).index_select(0, index.view(-1)), sign)
    _scaled(out, q, _nibbles(blocks[:, 74:82], out, 0.5).mul_(0.25).mul_(half(blocks, 0, out)))


def iq3_xxs(blocks: Tensor, out: Tensor) -> None:
    """x = d·(s + ½)/2·g per run of 32: d | 64 indices | 8 times 4·7 bits of sign, 4 of s."""
    index = blocks[:, 2:66].to(torch.int32).view(-1)
    tail = words(blocks, 66, 32).view(torch.int32)[:, :, None]
    which = _shifted(tail, 7, 4) & 127
    sign = parity_signs(out.device).index_select(0, which.view(-1))
    q = negate(grid("IQ3_XXS", out.device).index_select(0, index).view(torch.int64), sign)
    scale = ((tail >> 28) & 15).to(out.dtype).add_(0.5).mul_(0.5)
    _scaled(out, q, scale.view(-1, 8).mul_(half(blocks, 0, out)))


def iq3_s(blocks: Tensor, out: Tensor) -> None:
    """x = d·(2s + 1)·g per run of 32: d | 64 bytes of index | 64 high bits | 32 of sign | 8 s."""
    index = (_shifted(blocks[:, 66:74, None].to(torch.int32), 1, 8) & 1) << 8
    index = index.view(-1, 64) | blocks[:, 2:66]
    sign = signs(out.device).index_select(0, blocks[:, 74:106].to(torch.int32).view(-1))
    q = grid("IQ3_S", out.device).index_select(0, index.view(-1)).view(torch.int64)
    scale = _nibbles(blocks[:, 106:110], out, 0.5).mul_(2).mul_(half(blocks, 0, out))
    _scaled(out, negate(q, sign), scale)


def iq1_s(blocks: Tensor, out: Tensor) -> None:
    """x = d·(2s + 1)·(g ± ⅛) per run of 32: d | 32 bytes of index | 8 times 4·3 high bits, s, ±."""
    tail = blocks[:, 34:50].view(torch.int16)[:, :, None].to(torch.int32)
    index = (_shifted(tail, 3, 4) & 7) | ((tail >> 12) & 8)
    scale = ((tail >> 12) & 7).to(out.dtype).add_(0.5).mul_(0.25)
    _shifted_grid(out, blocks[:, 2:34], index, scale.view(-1, 8).mul_(half(blocks, 0, out)))


def iq1_m(blocks: Tensor, out: Tensor) -> None:
    """x = d·(2s + 1)·(g ± ⅛) per run of 16: 32 bytes of index | 32 times 3 high bits, ± | tail.

    The tail is 4 times 16 bits: 4·3 bits of s, 4 bits of d.
    """
    tail = blocks[:, 48:56].view(torch.int16).to(torch.int32)
    top = (tail >> 12) & 15
    bits = top[:, :1] | top[:, 1:2] << 4 | top[:, 2:3] << 8 | top[:, 3:] << 12
    d = bits.to(torch.int16).view(torch.float16).to(out.dtype)
    scale = (_shifted(tail[:, :, None], 3, 4) & 7).to(out.dtype).add_(0.5).mul_(0.25)
    index = _shifted(blocks[:, 32:48, None].to(torch.int32), 4, 2) & 15
    _shifted_grid(out, blocks[:, :32], index, scale.view(-1, 16).mul_(d))


def _shifted_grid(out: Tensor, low: Tensor, high: Tensor, scale: Tensor) -> None:
    """Fill `out` from IQ1's indices: 8 low bits `[n, 32]`, 3 high bits and the sign bit."""
    index = (high << 8).view(-1, 32) | low
    _scaled(out, shifted_grid(out.device).index_select(0, index.view(-1)), scale)


def _shifted(values: Tensor, step: int, count: int) -> Tensor:
    """`values` int32 `[…, 1]` shifted right by 0, `step`, 2·`step` … bits: `[…, count]`."""
    stop = step * count
    return values >> torch.arange(0, stop, step, dtype=torch.int32, device=values.device)


def _nibbles(scales: Tensor, out: Tensor, add: float) -> Tensor:
    """Nibbles of bytes `[n, w]`, low before high, plus `add`, in `out`'s dtype."""
    both = torch.stack((scales & 15, scales >> 4), -1)
    return both.view(len(scales), -1).to(out.dtype).add_(add)


def _scaled(out: Tensor, q: Tensor, scales: Tensor) -> None:
    """Fill `out` [n, 256] with signed bytes times the scales `[n, runs]` of its runs."""
    out.copy_(q.view(torch.int8).view(out.shape))
    out.view(*scales.shape, -1).mul_(scales[:, :, None])
