"""Quantization of float32 rows to 8- and 4-bit blocks, bit-identical to `gguf.quants.quantize`.

Sources: ggml's `quantize_row_q8_0_ref` and `quantize_row_q4_1_ref` (`ggml-quants.c`). Numbers
beyond float16's range give infinite scales, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize(values: Tensor, format: str) -> Tensor:
    """Rows `[n, K]` of float32 as bytes `[n, bytes]` of `Q8_0` or `Q4_1` blocks.

    K is a multiple of 32. Raises ValueError for other formats.
    """
    if format not in _ENCODERS:
        raise ValueError(f"unsupported format {format}: use {' or '.join(_ENCODERS)}")
    blocks = _ENCODERS[format](values.reshape(-1, 32))
    return blocks.view(len(values), -1)


def _q8_0(x: Tensor) -> Tensor:
    """d | 32 signed bytes: d = max|x| ÷ 127, q = x ÷ d, halves away from zero."""
    d = x.abs().amax(-1, keepdim=True) / 127
    scaled = x * _inverse(d)
    q = (scaled.abs() + 0.5).floor().copysign(scaled).to(torch.int8)
    return torch.cat((d.half().view(torch.uint8), q.view(torch.uint8)), 1)


def _q4_1(x: Tensor) -> Tensor:
    """d | m | 16 bytes of nibbles: m = min x, d = (max x - m) ÷ 15, q = (x - m) ÷ d + ½, whole."""
    least = x.amin(-1, keepdim=True)
    d = (x.amax(-1, keepdim=True) - least) / 15
    q = ((x - least) * _inverse(d) + 0.5).to(torch.uint8).clamp_(max=15)
    nibbles = q[:, :16] | q[:, 16:] << 4
    return torch.cat((d.half().view(torch.uint8), least.half().view(torch.uint8), nibbles), 1)


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0, 1 / d)


_ENCODERS = {"Q8_0": _q8_0, "Q4_1": _q4_1}
