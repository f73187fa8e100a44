"""What a feed-forward layer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class GateClamp:
    """Gates g and neurons u within bounds: `act(min(g, limit)) ∘ (clip(u, ±limit) + offset)`.

    gpt-oss has it with `quick_gelu`, a limit of 7 and an offset of 1.
    """

    limit: float
    offset: float


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """`act(X W_up + b_up) W_down + b_down`, or gated: `(act(X W_gate) ∘ X W_up) W_down`.

    `clamp`: what bounds gates, and the neurons that they multiply.
    """

    hidden: int
    activation: Activation
    gated: bool
    bias: bool = False
    clamp: GateClamp | None = None
