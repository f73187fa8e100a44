"""What a feed-forward layer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """`act(X W_up + b_up) W_down + b_down`, or gated: `(act(X W_gate) ∘ X W_up) W_down`."""

    hidden: int
    activation: Activation
    gated: bool
    bias: bool = False
