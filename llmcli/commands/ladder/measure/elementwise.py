"""Functions of one number, or of a tensor's numbers: each formula stands here once for both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llmcli.parts.mlp.config import Activation, MlpConfig

Function = Callable[..., Any]  # of floats to a float, of tensors to a tensor


@dataclass(frozen=True)
class Functions:
    """What the formulas are made of: `clip(x, low, high)`, and the usual others."""

    tanh: Function
    erf: Function
    clip: Function


FLOATS = Functions(math.tanh, math.erf, lambda x, low, high: min(max(x, low), high))
TENSORS = Functions(torch.tanh, torch.erf, torch.clamp)


def add(*terms: Any) -> Any:
    """The sum, from the left."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def sigmoid(x: Any, of: Functions) -> Any:
    """`1 / (1 + exp(-x))`, written so that nothing overflows."""
    return 0.5 * (1 + of.tanh(0.5 * x))


def soft_cap(x: Any, cap: float, of: Functions) -> Any:
    """`cap · tanh(x / cap)`: about x near 0, and never beyond ±cap."""
    return cap * of.tanh(x / cap)


def activate(kind: Activation, x: Any, of: Functions) -> Any:
    """What each neuron does with its sum."""
    match kind:
        case "silu":
            return x * sigmoid(x, of)
        case "quick_gelu":
            return x * sigmoid(1.702 * x, of)
        case "sigmoid":
            return sigmoid(x, of)
        case "gelu":
            return 0.5 * x * (1 + of.erf(x / math.sqrt(2)))
        case "gelu_tanh":
            return 0.5 * x * (1 + of.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "relu":
            return of.clip(x, 0.0, math.inf)
        case "relu2":
            return of.clip(x, 0.0, math.inf) ** 2


def gated(gate: Any, up: Any, config: MlpConfig, of: Functions) -> Any:
    """`Activation(gate) · up`, both within bounds where the model clamps them."""
    if (clamp := config.clamp) is not None:
        gate = of.clip(gate, -math.inf, clamp.limit)
        up = of.clip(up, -clamp.limit, clamp.limit) + clamp.offset
    return activate(config.activation, gate, of) * up
