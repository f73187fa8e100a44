"""Element-wise operations by our kernels if supported, otherwise by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.config.mlp import GateClamp
from llmcli.kernels import program
from llmcli.kernels.program import bits, call
from llmcli.ops import compiled
from llmcli.ops.norm import at_least_float32, ones


def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`, of equal shapes."""
    if not compiled.takes(x, y):
        return x + y
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    return call(program.ADD, x, y, out, x.numel(), out=out)


def scale(x: Tensor, factor: float | Tensor) -> Tensor:
    """`x · factor` with a scalar, whose current value a recorded step keeps."""
    if not compiled.takes(x):
        return x * factor
    x = x.contiguous()
    out = torch.empty_like(x)
    return call(program.SCALE, x, bits(float(factor)), out, x.numel(), out=out)


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """`x ∘ f`, with one factor f `[…, 1]` per row."""
    if not compiled.takes(x, factors):
        return x * factors
    x, factors = x.contiguous(), factors.contiguous()
    out = torch.empty_like(x)
    return call(program.SCALE_ROWS, x, factors, out, factors.numel(), x.shape[-1], out=out)


def gate(x: Tensor, y: Tensor, clamp: GateClamp | None = None) -> Tensor:
    """`x ∘ y`, of equal shapes; with a `clamp` `x ∘ (clip(y, ±limit) + offset)`, rounded once."""
    if compiled.takes(x, y):
        first, second, out = compiled.in_rows(x), compiled.in_rows(y), torch.empty(x.shape)
        limit, offset = (clamp.limit, clamp.offset) if clamp else (0.0, 0.0)
        return call(
            program.GATE, first, second, second.stride(0), out, *first.shape, clamp is not None,
            bits(limit), bits(offset), first.stride(0), out=out,
        )  # fmt: skip
    if clamp is None:
        return x * y
    wide = at_least_float32(y).clamp(-clamp.limit, clamp.limit).add_(clamp.offset)
    return wide.mul_(x).to(x.dtype)


def clip(x: Tensor, limit: float) -> Tensor:
    """`x` limited to ±`limit`."""
    if not compiled.takes(x):
        return x.clamp(-limit, limit)
    rows, out = compiled.in_rows(x), torch.empty(x.shape)
    # the gate 1 ∘ (clip(x, ±limit) + 0); its first factor is one row with stride 0
    factor, stride, offset = ones(rows.shape[1]).data_ptr(), 0, bits(0.0)
    return call(
        program.GATE, factor, rows, rows.stride(0), out, *rows.shape, True, bits(limit), offset,
        stride, out=out,
    )  # fmt: skip


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` converted to `dtype`, or `x` itself if it has that dtype."""
    if dtype not in compiled.IN_16_BITS or not compiled.takes(x):
        return x.to(dtype)
    rows, out = compiled.in_rows(x), torch.empty(x.shape, dtype=dtype)
    return call(
        program.NARROW, rows, rows.stride(0), out, *rows.shape, compiled.NUMBERS.index(dtype),
        out=out,
    )
