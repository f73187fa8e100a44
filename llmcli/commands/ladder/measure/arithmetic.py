"""The arithmetic that rungs share: of numbers or tensors alike, and of one row or many of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.record import shown, shown_last
from llmcli.commands.ladder.measure.weights import Matrix, NormWeights
from llmcli.parts.mlp.config import Activation, MlpConfig

Function = Callable[..., Any]  # of floats to a float, of tensors to a tensor


def either(of_float: Function, of_tensor: Function) -> Function:
    """The function of the first argument's type."""
    return lambda x, *more: (of_float if isinstance(x, float) else of_tensor)(x, *more)


tanh = either(math.tanh, torch.tanh)
erf = either(math.erf, torch.erf)
clip = either(lambda x, low, high: min(max(x, low), high), torch.clamp)


def add(*terms: Any) -> Any:
    """The sum, from the left."""
    return reduce(operator.add, terms)


def sigmoid(x: Any) -> Any:
    """`1 / (1 + exp(-x))`, written so that nothing overflows."""
    return 0.5 * (1 + tanh(0.5 * x))


def soft_cap(x: Any, cap: float) -> Any:
    """`cap · tanh(x / cap)`: about x near 0, and never beyond ±cap."""
    return cap * tanh(x / cap)


# what each neuron does with its sum
ACTIVATIONS: dict[Activation, Function] = {
    "silu": lambda x: x * sigmoid(x),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "sigmoid": sigmoid,
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: clip(x, 0.0, math.inf),
    "relu2": lambda x: clip(x, 0.0, math.inf) ** 2,
}


def gated(gate: Any, up: Any, config: MlpConfig) -> Any:
    """`Activation(gate) · up`, both within bounds where the model clamps them."""
    if (clamp := config.clamp) is not None:
        gate = clip(gate, -math.inf, clamp.limit)
        up = clip(up, -clamp.limit, clamp.limit) + clamp.offset
    return ACTIVATIONS[config.activation](gate) * up


# What the rungs from 2 on do with tensors.


@shown
def times(x_ni: Tensor, matrix: Matrix) -> Tensor:
    """`X W + B`: all neurons of a row (GEMV) or of all rows (GEMM), b added to every row."""
    y_nj = x_ni @ matrix.W
    if matrix.b is not None:
        y_nj = y_nj + matrix.b
    return y_nj


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
