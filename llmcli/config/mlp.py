"""Configuration of a feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid"]

# How formulas write each, in the order of `enum activation` in kernels/steps.c and of
# kernels/triton/products.py.
ACTIVATIONS: dict[Activation, str] = {
    "silu": "SiLU",
    "gelu": "GELU",
    "gelu_tanh": "GELU_tanh",
    "quick_gelu": "QuickGELU",
    "relu": "ReLU",
    "relu2": "ReLU²",
    "sigmoid": "σ",
}


@dataclass(frozen=True, kw_only=True)
class GateClamp:
    """Bounds of gates g and neurons u: `act(min(g, limit)) ∘ (clip(u, ±limit) + offset)`.

    Used by gpt-oss with `quick_gelu`, limit 7 and offset 1.
    """

    limit: float
    offset: float


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """`act(X W_up + b_up) W_down + b_down`, or gated: `(act(X W_gate) ∘ X W_up) W_down`.

    `clamp`: bounds of gates, and of the neurons that they multiply.
    """

    hidden: int
    activation: Activation
    gated: bool
    bias: bool = False
    clamp: GateClamp | None = None

    AXES = "F hidden"
