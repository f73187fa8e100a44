"""The arithmetic that rungs share: of numbers or tensors alike, and of one row or many of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.record import shown, shown_last
from llmcli.commands.ladder.measure.weights import NormWeights
from llmcli.parts.attention.config import QueryGrowth
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
    return reduce(operator.add, terms)


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


# What the rungs from 2 on do with tensors.


@shown_last
def normalized(x_ni: Tensor, norm: NormWeights) -> Tensor:
    """Each row: LayerNorm `(x − μ)/√(σ² + ε) · w + b`, RMSNorm `x/√(mean(x²) + ε) · w`."""
    if norm.config.kind == "layer":
        mean_n1 = x_ni.mean(-1, keepdim=True)  # μ
        x_ni = x_ni - mean_n1
    square_n1 = (x_ni * x_ni).mean(-1, keepdim=True)  # σ², or mean(x²)
    y_ni = x_ni / (square_n1 + norm.config.eps).sqrt()
    if (factor := norm.factor) is not None:
        y_ni = factor * y_ni  # · w
    if norm.b is not None:
        y_ni = y_ni + norm.b
    return y_ni


@shown
def rotated(x_nk: Tensor, cos_nj: Tensor, sin_nj: Tensor) -> Tensor:
    """R(position) x: two halves of a head turned against each other, the rest as it is."""
    half = cos_nj.shape[-1]
    a, b, rest = x_nk.tensor_split((half, 2 * half), -1)
    y_nk = torch.cat((a * cos_nj - b * sin_nj, b * cos_nj + a * sin_nj, rest), -1)
    return y_nk


def growth(by: QueryGrowth, positions: Tensor, like: Tensor) -> Tensor:
    """`1 + β ln(1 + ⌊p / original⌋)` of each position p, in the dtype of `like`."""
    steps = torch.div(positions, by.original, rounding_mode="floor").double()
    return (1 + by.beta * torch.log1p(steps)).to(like)


@shown_last
def softmax(s_nm: Tensor, sink: Tensor | None = None) -> Tensor:
    """Each row `exp(s) / Σ exp(s)`; its largest is subtracted first so that nothing overflows.

    A `sink` `[…, 1, 1]` is one score more in the sum of each row.
    """
    largest = s_nm.max(-1, keepdim=True).values
    if sink is not None:
        largest = torch.maximum(largest, sink)
    p_nm = (s_nm - largest).exp()
    sum_n1 = p_nm.sum(-1, keepdim=True)
    if sink is not None:
        sum_n1 = sum_n1 + (sink - largest).exp()
    return p_nm / sum_n1


def mask(n: int, window: int | None) -> Tensor:
    """M `[n, n]`: −∞ where key j is after query i, or a whole window before it; 0 elsewhere."""
    hidden = torch.full((n, n), -torch.inf)
    return hidden.triu(1) if window is None else hidden.triu(1) + hidden.tril(-window)
