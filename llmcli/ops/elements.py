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
    return compiled.flat(program.ADD, x, y.contiguous()) if compiled.takes(x, y) else x + y


def scale(x: Tensor, factor: float | Tensor) -> Tensor:
    """`x · factor` with a scalar, whose current value a recorded step keeps."""
    if compiled.takes(x):
        return compiled.flat(program.SCALE, x, bits(float(factor)))
    return x * factor


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """`x ∘ f`, with one factor f `[…, 1]` per row."""
    if not compiled.takes(x, factors):
        return x * factors
    x, factors = x.contiguous(), factors.contiguous()
    out = torch.empty_like(x)
    return call(program.SCALE_ROWS, x, factors, out, factors.numel(), x.shape[-1], out=out)


def gate(x: Tensor, y: Tensor, clamp: GateClamp | None = None) -> Tensor:
    """`x ∘ y`, of equal shapes; with a `clamp` `x ∘ (clip(y, ±limit) + offset)`, rounded once."""
    if x.dtype in compiled.EMULATED and program.recording():  # PyTorch's product has the same bits
        wide = gate(compiled.widened(x), compiled.widened(y), clamp)
        return compiled.cast(wide, torch.promote_types(x.dtype, y.dtype))
    if compiled.takes(x, y):
        rows = compiled.in_rows(x)
        return _gated(rows, rows.stride(0), y, clamp)
    if clamp is None:
        return x * y
    wide = at_least_float32(y).clamp(-clamp.limit, clamp.limit).add_(clamp.offset)
    return wide.mul_(x).to(x.dtype)


def clip(x: Tensor, limit: float) -> Tensor:
    """`x` limited to ±`limit`."""
    if not compiled.takes(x):
        return x.clamp(-limit, limit)
    return _gated(ones(x.shape[-1]).data_ptr(), 0, x, GateClamp(limit=limit, offset=0.0))


def _gated(factors: Tensor | int, stride: int, y: Tensor, clamp: GateClamp | None) -> Tensor:
    """`gate` of rows of factors (or the address of a row that changes nothing) and y."""
    rows, out = compiled.in_rows(y), torch.empty(y.shape)
    limit, offset = (clamp.limit, clamp.offset) if clamp else (0.0, 0.0)
    bounds = clamp is not None, bits(limit), bits(offset)
    return call(
        program.GATE, factors, rows, rows.stride(0), out, *rows.shape, *bounds, stride, out=out
    )
