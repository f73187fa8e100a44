"""Dequantization of GGML blocks, vectorized; the twin of `gguf.quants.dequantize`.

A row of a tensor is a run of blocks; a block holds a few half-precision scales and the packed
integers that they multiply. Sources: ggml's `ggml-quants.c` (`dequantize_row_*`) and its
Python port in the gguf package, to which these functions are bit-equal in float32.

Two things make them fast: packed integers are unpacked eight bytes at a time (an int64 is
eight bytes, and a mask keeps neighbours apart), and work goes in chunks that stay in the cache.

Axes: n blocks, e elements of a block. Bytes are little-endian, as GGUF files are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmcli.checkpoints.tensors import GGML_TYPES
from llmcli.errors import CheckpointError, UnsupportedModel

# Elements decoded at a time: 4 MiB of float32. Of 2^16 … 2^21 the fastest on two cores (below
# it the calls cost more than their work), and what bounds temporary memory (about 10 MiB).
_CHUNK = 1 << 20

# Name of a GGML type -> (elements of a block, bytes of a block).
FORMATS = {name: (elements, size) for name, elements, size in GGML_TYPES.values()}

# Formats whose elements PyTorch has a type for.
PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def check_format(format: str) -> None:
    """Raises `UnsupportedModel` for a format that `dequantize` does not know."""
    if format not in PLAIN and format not in DECODERS:
        raise UnsupportedModel(
            f"tensors in the format `{format}` cannot be read",
            hint="formats that can: " + ", ".join((*PLAIN, *DECODERS)),
        )


def dequantize(
    raw: Tensor, format: str, *, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return the values `[rows, row_length]` in `dtype` of packed rows `raw`.

    `raw` is uint8 `[rows, bytes_per_row]`, each row a whole number of `format` blocks.
    The arithmetic is in float32 (in float64 where `dtype` is float64), then cast; temporary
    memory is a few MiB whatever the size. `out`, if given, is filled and returned: it has the
    result's shape and `dtype`. Raises `UnsupportedModel` for a format without a decoder and
    `CheckpointError` for rows that are no whole number of blocks.
    """
    check_format(format)
    elements, size = FORMATS[format]
    if raw.dtype != torch.uint8 or raw.ndim != 2 or raw.shape[1] % size:
        raise CheckpointError(
            f"{raw.dtype} rows of shape {list(raw.shape)} are not rows of {format} blocks"
            f" of {size} bytes"
        )
    shape = (raw.shape[0], raw.shape[1] // size * elements)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=raw.device)
    elif tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}, not {list(shape)} {dtype}")
    if raw.numel() == 0 or raw.is_meta:
        return out
    if format in PLAIN:
        return out.copy_(_aligned(raw.contiguous(), size).view(PLAIN[format]))
    _fill(out, raw, DECODERS[format], elements, size)
    return out


def _fill(out: Tensor, raw: Tensor, decode: Decoder, elements: int, size: int) -> None:
    """Decode `raw` into `out` in chunks: runs of blocks, or of rows where memory has gaps."""
    compute = torch.float64 if out.dtype == torch.float64 else torch.float32
    if raw.is_contiguous() and out.is_contiguous():
        raw, out = raw.view(-1, size), out.view(-1, elements)
    step = max(1, _CHUNK // out.shape[1])
    buffer = torch.empty(0, dtype=compute, device=out.device)
    for start in range(0, raw.shape[0], step):
        part = out[start : start + step]
        blocks = _aligned(raw[start : start + step].reshape(-1, size), 2)
        if part.is_contiguous() and part.dtype == compute:
            decode(blocks, part.view(-1, elements))
            continue
        values = buffer.resize_(blocks.shape[0], elements)  # the same memory for every chunk
        decode(blocks, values)
        part.copy_(values.view(part.shape))


def _aligned(blocks: Tensor, size: int) -> Tensor:
    """`blocks`, copied if its address is no multiple of `size`: PyTorch refuses such views."""
    if blocks.data_ptr() % size or blocks.storage_offset() % size:
        return blocks.clone()
    return blocks


# Decoders: `blocks` uint8 [n, bytes] (2-byte aligned) into `out` [n, e] of float32 or float64.
# Integers are subtracted before the scale multiplies, and a minimum is applied in a step of its
# own (no fused multiply-add): the rounding of ggml's reference.

Decoder = Callable[[Tensor, Tensor], None]


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """x = d·(q - 8): d | 16 bytes of nibbles."""
    q = _halves(_words(blocks, 2, 16)).view(torch.int8).sub_(8)
    out.copy_(q).mul_(_half(blocks, 0, out))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """x = d·q + m: d | m | 16 bytes of nibbles."""
    q = _halves(_words(blocks, 4, 16)).view(torch.uint8)
    out.copy_(q).mul_(_half(blocks, 0, out)).add_(_half(blocks, 2, out))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """x = d·(q - 16): d | 32 fifth bits | 16 bytes of nibbles."""
    q = _halves(_words(blocks, 6, 16)).bitwise_or_(_fifth(blocks[:, 2:6]))
    out.copy_(q.view(torch.int8).sub_(16)).mul_(_half(blocks, 0, out))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    """x = d·q + m: d | m | 32 fifth bits | 16 bytes of nibbles."""
    q = _halves(_words(blocks, 8, 16)).bitwise_or_(_fifth(blocks[:, 4:8]))
    out.copy_(q.view(torch.uint8)).mul_(_half(blocks, 0, out)).add_(_half(blocks, 2, out))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """x = d·q: d | 32 signed bytes."""
    out.copy_(_words(blocks, 2, 32).view(torch.int8)).mul_(_half(blocks, 0, out))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """x = (d·s)·q - (dmin·m) per run of 32: d | dmin | 12 bytes of s, m | 128 of nibbles."""
    q = _halves(_words(blocks, 16, 128).view(-1, 4, 4))
    _scale_min(out.view(-1, 8, 32), q.view(torch.uint8), blocks)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K with fifth bits: d | dmin | 12 bytes of s, m | 32 of high bits | 128 of nibbles."""
    q = _halves(_words(blocks, 48, 128).view(-1, 4, 4)).view(-1, 8, 4)
    high = _words(blocks, 16, 32)
    for run in range(8):  # bit `run` of byte j belongs to element j of that run
        q[:, run] |= ((high >> run) & _each(0x01)) << 4
    _scale_min(out.view(-1, 8, 32), q.view(torch.uint8), blocks)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """x = (d·s)·(q - 32) per run of 16: 128 bytes of low nibbles | 64 of 2 high bits | 16 s | d."""
    q = _halves(_words(blocks, 0, 128).view(-1, 2, 8)).view(-1, 2, 4, 4)
    high = _words(blocks, 128, 64).view(-1, 2, 4)
    for run in range(4):  # bits 2·run, 2·run + 1 of byte j belong to element j of that run
        q[:, :, run] |= ((high >> (2 * run)) & _each(0x03)) << 4
    scales = blocks[:, 192:208].view(torch.int8).to(out.dtype).mul_(_half(blocks, 208, out))
    out.copy_(q.view(torch.int8).view(out.shape).sub_(32))
    out.view(-1, 16, 16).mul_(scales[:, :, None])


DECODERS: dict[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _half(blocks: Tensor, offset: int, like: Tensor) -> Tensor:
    """The half-precision number at byte `offset` of every block, `[n, 1]` in `like`'s dtype."""
    return blocks[:, offset : offset + 2].view(torch.float16).to(like.dtype)


def _words(blocks: Tensor, offset: int, count: int) -> Tensor:
    """`count` bytes of every block as int64 `[n, count / 8]`, copied together."""
    words = blocks[:, offset : offset + count]
    # not `contiguous()`: it returns one block as it is, at an address that int64 may not have
    return words.clone(memory_format=torch.contiguous_format).view(torch.int64)


def _each(byte: int) -> int:
    """The int64 whose eight bytes are all `byte`."""
    return int.from_bytes(bytes([byte] * 8), "little", signed=True)


def _halves(words: Tensor) -> Tensor:
    """Nibbles to bytes: int64 `[…, w]` to `[…, 2w]`, all the low nibbles, then all the high."""
    return torch.cat((words, words >> 4), -1).bitwise_and_(_each(0x0F))


def _fifth(bits: Tensor) -> Tensor:
    """Bits to bytes: 4 bytes `[n, 4]` to int64 `[n, 4]` with 0x10 in byte j of word i for bit j.

    Each byte is copied to all eight; the mask leaves bit j in byte j; adding 0x7F carries any
    bit into the top one, which is shifted to where the fifth bit belongs.
    """
    diagonal = int.from_bytes(bytes(1 << j for j in range(8)), "little", signed=True)
    spread = (bits.to(torch.int64) * _each(0x01)).bitwise_and_(diagonal)
    return spread.add_(_each(0x7F)).bitwise_right_shift_(3).bitwise_and_(_each(0x10))


def _scale_min(out: Tensor, q: Tensor, blocks: Tensor) -> None:
    """Fill `out` [n, 8, 32] with (d·s)·q - (dmin·m), s and m unpacked from bytes 4 … 16.

    Those 12 bytes hold eight pairs of 6 bits: s0…s3 and m0…m3 in the low bits of bytes 0–3 and
    4–7, s4…s7 and m4…m7 in the nibbles of bytes 8–11 with their upper 2 bits in the former's.
    """
    s, m, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((s & 63, (low & 15) | ((s >> 2) & 48)), 1)
    minima = torch.cat((m & 63, (low >> 4) | ((m >> 2) & 48)), 1)
    d = scales.to(out.dtype).mul_(_half(blocks, 0, out))
    least = minima.to(out.dtype).mul_(_half(blocks, 2, out))
    out.copy_(q.view(out.shape)).mul_(d[:, :, None]).sub_(least[:, :, None])
