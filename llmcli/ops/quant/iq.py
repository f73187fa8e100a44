"""Blocks of 256 elements by grids: IQ2, IQ3 and IQ1 formats.

Conventions: `decode`. A scale has at most 16 significant bits and a grid value 6: products are
exact in float32 in any order. An index into a table gives eight (or four) values at once, signed
bytes in an int64 (int32), on the requested device. The grids are ggml's (`ggml-common.h`); the gguf
package carries them packed.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from llmcli.ops.quant.bits import half, words


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
    _by_shifted_grid(out, blocks[:, 2:34], index, scale.view(-1, 8).mul_(half(blocks, 0, out)))


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
    _by_shifted_grid(out, blocks[:, :32], index, scale.view(-1, 16).mul_(d))


def _by_shifted_grid(out: Tensor, low: Tensor, high: Tensor, scale: Tensor) -> None:
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


@cache
def grid(format: str, device: torch.device) -> Tensor:
    """The magnitudes of an IQ2 or IQ3 format by index: int64 `[entries]`, int32 for IQ3."""
    values = _values(format)
    return values.view(torch.int64 if values.shape[1] == 8 else torch.int32).view(-1).to(device)


@cache
def signed_grid(format: str, device: torch.device) -> Tensor:
    """int64 `[128 · entries]`: entry `index + entries · signs`, the eighth sign by parity."""
    one, sign = grid(format, torch.device("cpu")), parity_signs(torch.device("cpu"))
    return negate(one, sign[:, None]).view(-1).to(device)


@cache
def shifted_grid(device: torch.device) -> Tensor:
    """IQ1's int64 `[2 · 2048]` of 8·(g ± 1/8): the second half with minus."""
    values = _values("IQ1_S") * 8
    both = torch.cat((values + 1, values - 1))
    return both.view(torch.int64).view(-1).to(device)


@cache
def signs(device: torch.device) -> Tensor:
    """int64 `[256]`: byte j is all ones where bit j of the index is set."""
    bit = torch.arange(256)[:, None] >> torch.arange(8)
    return (bit & 1).neg().to(torch.int8).view(torch.int64).view(-1).to(device)


@cache
def parity_signs(device: torch.device) -> Tensor:
    """int64 `[128]`: `signs` of seven bits and a parity bit."""
    even = [x | (x.bit_count() & 1) << 7 for x in range(128)]
    return signs(device)[torch.tensor(even, device=device)]


def negate(values: Tensor, sign: Tensor) -> Tensor:
    """Apply `signs` to bytes that are not 0; both int64.

    -x is ~x + 1, which stays within its byte since x is not 0.
    """
    return (values ^ sign).add_(sign & 0x0101010101010101)


def _values(format: str) -> Tensor:
    """A grid of the gguf package as int8 `[entries, 8 or 4]`."""
    from gguf import quants

    formats = (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S)
    (found,) = (one for one in (*formats, quants.IQ1_S) if one.qtype.name == format)
    found.init_grid()  # type: ignore[no-untyped-call]
    assert found.grid is not None
    return torch.from_numpy(found.grid).to(torch.int8).reshape(found.grid_shape)
