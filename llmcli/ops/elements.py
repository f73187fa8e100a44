"""Element by element, by our kernels where there are some and by PyTorch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.ops import compiled


def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`, of equal shapes."""
    return compiled.add(x, y) if compiled.takes(x) and compiled.takes(y) else x + y


def scale(x: Tensor, factor: float | Tensor) -> Tensor:
    """`x · factor`, of one number, which a recorded step keeps as it is now."""
    return compiled.scale(x, float(factor)) if compiled.takes(x) else x * factor


def gate(x: Tensor, y: Tensor) -> Tensor:
    """`x ∘ y`, of equal shapes."""
    return compiled.gate(x, y) if compiled.takes(x) and compiled.takes(y) else x * y


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in that dtype, itself where it has it already."""
    if dtype == torch.bfloat16 and compiled.takes(x):
        return compiled.narrow(x)
    return x.to(dtype)
