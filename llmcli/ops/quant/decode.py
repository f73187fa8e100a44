"""Vectorized dequantization of GGML blocks, equivalent to `gguf.quants.dequantize`.

A row of a tensor is a sequence of blocks; a block holds a few scales and packed integers or table
indices. Sources: ggml's `ggml-quants.c` (`dequantize_row_*`) and its Python port in the gguf
package, to which these functions are bit-equal in float32.

For speed, packed integers are unpacked eight bytes at a time (with masks on int64), tables give two
to eight elements per lookup, and chunks stay in the cache.

Axes: n blocks, e elements of a block. Bytes are little-endian, as in GGUF files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmcli.config.formats import DECODED_AT_ONCE
from llmcli.config.formats import FORMATS as IN_FILES
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.ops.quant import codes, iq, k_quants, simple

# Elements decoded at a time: 4 MiB of float32. The fastest of 2^16 … 2^21 on two cores (smaller
# chunks are dominated by calls); bounds temporary memory to about 10 MiB.
_CHUNK = 1 << 20

# Formats with a PyTorch dtype.
PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}

# Format -> (elements of a block, bytes of a block).
FORMATS = {
    **{name: (1, dtype.itemsize) for name, dtype in PLAIN.items()},
    **{name: (one.block, one.bytes) for name, one in IN_FILES.items()},
}

# A decoder: `blocks` uint8 [n, bytes] (2-byte aligned) into `out` [n, e] of float32 or float64.
# For ggml's rounding, integers are subtracted before scaling, and a minimum is applied separately
# (no fused multiply-add).
Decoder = Callable[[Tensor, Tensor], None]

DECODERS: dict[str, Decoder] = {
    decode.__name__.upper(): decode
    for decode in (
        simple.q4_0, simple.q4_1, simple.q5_0, simple.q5_1, simple.q8_0,
        k_quants.q2_k, k_quants.q3_k, k_quants.q4_k, k_quants.q5_k, k_quants.q6_k,
        simple.tq1_0, simple.tq2_0, codes.mxfp4, codes.nvfp4,
        iq.iq2_xxs, iq.iq2_xs, iq.iq2_s, iq.iq3_xxs, iq.iq3_s, iq.iq1_s, iq.iq1_m,
        codes.iq4_nl, codes.iq4_xs,
    )
}  # fmt: skip


def check_format(format: str) -> None:
    """Raise `UnsupportedModel` for a format unknown to `dequantize`."""
    if format not in PLAIN and format not in DECODERS:
        raise UnsupportedModel(
            f"unsupported tensor format `{format}`",
            hint="supported formats: " + ", ".join((*PLAIN, *DECODERS)),
        )


def dequantize(
    raw: Tensor, format: str, *, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Dequantize packed rows `raw` to `[rows, row_length]` in `dtype`.

    `raw` is uint8 `[rows, bytes_per_row]`, each row a whole number of `format` blocks.
    The arithmetic is in float32 (float64 if `dtype` is float64), then cast; temporary memory is a
    few MiB for any size. `out`, if given, has the result's shape and `dtype`, and is filled and
    returned. Raises `UnsupportedModel` for a format without a decoder and `CheckpointError` for
    rows that are not a whole number of blocks.
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
    if format == "F8_E4M3" and raw.device.type == "cpu":
        _fill(out, raw, simple.e4m3, elements, size)
        return out
    if format in PLAIN:
        return out.copy_(_aligned(raw.contiguous(), size).view(PLAIN[format]))
    _fill(out, raw, DECODERS[format], elements, size)
    return out


def _fill(out: Tensor, raw: Tensor, decode: Decoder, elements: int, size: int) -> None:
    """Decode `raw` into `out` in chunks: runs of blocks, or of rows if memory has gaps."""
    compute = torch.float64 if out.dtype == torch.float64 else torch.float32
    if raw.is_contiguous() and out.is_contiguous():
        raw, out = raw.view(-1, size), out.view(-1, elements)
    step = max(1, (_CHUNK if raw.is_cpu else DECODED_AT_ONCE) // out.shape[1])
    buffer = torch.empty(0, elements, dtype=compute, device=out.device)
    for start in range(0, raw.shape[0], step):
        part = out[start : start + step]
        blocks = _aligned(raw[start : start + step].reshape(-1, size), 2)
        if part.is_contiguous() and part.dtype == compute:
            decode(blocks, part.view(-1, elements))
            continue
        if len(blocks) > len(buffer):  # the first is the largest; its buffer is reused
            buffer = torch.empty(len(blocks), elements, dtype=compute, device=out.device)
        values = buffer[: len(blocks)]
        decode(blocks, values)
        part.copy_(values.view(part.shape))


def _aligned(blocks: Tensor, size: int) -> Tensor:
    """`blocks`, copied if its address is not a multiple of `size`: PyTorch refuses such views."""
    if blocks.data_ptr() % size or blocks.storage_offset() % size:
        return blocks.clone()
    return blocks
