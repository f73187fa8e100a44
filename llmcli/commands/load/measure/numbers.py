"""Statistics of weights, a little at a time: of parameters in memory, and of tensors in a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.commands.load.measure.outliers import Outliers
from llmcli.commands.load.report import Numbers
from llmcli.inspect.statistics import Statistics, parts
from llmcli.ops.quant import DECODERS, FORMATS, PLAIN, dequantize

_AT_ONCE = 1 << 20  # numbers that are decoded at a time: 4 MiB of float32
# What else safetensors knows and PyTorch has a type for; no model is made of them.
_OTHERS = {
    "BOOL": torch.uint8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.float32, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
}  # fmt: skip
_WIDE = ("F64", "I32", "I64", "U32", "U64")  # more digits than float32 has


def parameter_numbers(stored: Tensor, *, turned: bool) -> Numbers:
    """Statistics of a parameter as it is in memory, without a second copy of it.

    `turned`: formulas have its transpose, and so the index of the first bad number is transposed.
    """
    found = Statistics()
    for part in parts(stored):
        found.add(part)
    numbers = _numbers(found, tuple(stored.shape))
    bad = numbers.first_bad
    if bad is None or not turned:
        return numbers
    return replace(numbers, first_bad=(*bad[:-2], *bad[:-3:-1]))


def stored_numbers(checkpoint: Checkpoint, info: TensorInfo) -> tuple[Numbers, list[str]] | None:
    """Statistics of a tensor as it is stored (a scale beside it left out), read in pieces.

    And the places of blocks that are unlike all others, where all numbers are real and finite. None
    for a format that has no decoder. Raises CheckpointError where the file has changed.
    """
    if not readable(info.format):
        return None
    found = Statistics()
    outliers = Outliers(prod(info.shape), info.shape[-1] if info.shape else 1)
    real = info.format in DECODERS or (
        info.format in PLAIN and PLAIN[info.format].is_floating_point
    )
    for part in _stored_parts(checkpoint, info):
        found.add(part)
        if real:
            outliers.add(part)
    shape = (*info.shape, 2) if info.format == "C64" else info.shape
    numbers = _numbers(found, shape)
    odd = outliers.found() if real and numbers.finite == numbers.count else []
    places = [",".join(map(str, np.unravel_index(first, shape))) for first in odd]
    return numbers, [f"`{info.name}[{place}]`" for place in places]


def readable(format: str) -> bool:
    """Whether numbers in that format can be read."""
    return format in PLAIN or format in DECODERS or format in _OTHERS


def _stored_parts(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Tensor]:
    """Its numbers in order; blocks have no neighbours, so that rows do not matter."""
    other = _OTHERS.get(info.format)
    elements, size = (1, other.itemsize) if other is not None else FORMATS[info.format]
    step = max(1, _AT_ONCE // elements) * size
    for start in range(0, info.nbytes, step):
        data = checkpoint.read(info.name, start, min(start + step, info.nbytes))
        if other is not None:
            yield torch.frombuffer(data, dtype=other)
            continue
        raw = torch.frombuffer(data, dtype=torch.uint8).view(1, -1)
        dtype = torch.float64 if info.format in _WIDE else torch.float32
        yield dequantize(raw, info.format, dtype=dtype)


def _numbers(found: Statistics, shape: tuple[int, ...]) -> Numbers:
    return Numbers(
        count=found.seen,
        mean=found.mean,
        std=found.std,
        min=found.low,
        max=found.high,
        zeros=found.zeros,
        nan=found.nan,
        inf=found.infinite,
        negative_inf=found.negative,
        first_bad=found.bad_index(shape),
    )
