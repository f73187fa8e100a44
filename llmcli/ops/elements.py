"""Element-wise operations by our kernels if supported, otherwise by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.ops import compiled
from llmcli.ops.norm import at_least_float32
from llmcli.parts.mlp.config import GateClamp


def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`, of equal shapes."""
    return compiled.add(x, y) if compiled.takes(x) and compiled.takes(y) else x + y


def scale(x: Tensor, factor: float | Tensor) -> Tensor:
    """`x · factor` with a scalar, whose current value a recorded step keeps."""
    return compiled.scale(x, float(factor)) if compiled.takes(x) else x * factor


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """`x ∘ f`, with one factor f `[…, 1]` per row."""
    both = compiled.takes(x) and compiled.takes(factors)
    return compiled.scale_rows(x, factors) if both else x * factors


def gate(x: Tensor, y: Tensor, clamp: GateClamp | None = None) -> Tensor:
    """`x ∘ y`, of equal shapes; with a `clamp` `x ∘ (clip(y, ±limit) + offset)`, rounded once."""
    if compiled.takes(x) and compiled.takes(y):
        return compiled.gate(x, y, clamp)
    if clamp is None:
        return x * y
    wide = at_least_float32(y).clamp(-clamp.limit, clamp.limit).add_(clamp.offset)
    return wide.mul_(x).to(x.dtype)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` converted to `dtype`, or `x` itself if it has that dtype."""
    if dtype in compiled.IN_16_BITS and compiled.takes(x):
        return compiled.narrow(x, dtype)
    return x.to(dtype)
