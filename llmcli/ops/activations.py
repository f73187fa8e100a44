"""Element-wise activations of feed-forward layers, gates and logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.config.mlp import ACTIVATIONS, Activation
from llmcli.kernels import program
from llmcli.kernels.program import bits, call
from llmcli.ops import compiled
from llmcli.ops.norm import at_least_float32


def gelu_tanh(x: Tensor) -> Tensor:
    """`0.5 x (1 + tanh(√(2/π)(x + 0.044715 x³)))`: the tanh form of GELU (GPT-2, Gemma)."""
    return F.gelu(x, approximate="tanh")


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))` > 0: step sizes of Mamba-2 and gated DeltaNet.

    The decay is `exp(-dt · A)`. Above 20 the result is x, at most 2.1e-9 too low, as in the
    reference implementations; below -20 the formula gives exp(x).
    """
    return F.softplus(x, threshold=20.0)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap · tanh(x / cap)`: close to x near 0 and within ±cap (Gemma 2, arXiv 2408.00118).

    For attention scores before the mask, and for logits. Computed in at least float32, since three
    roundings to bfloat16's three digits would be too coarse. The result has the dtype of x.
    """
    if compiled.takes(x):
        return compiled.flat(program.SOFT_CAP, x, bits(cap))
    return (at_least_float32(x) / cap).tanh_().mul_(cap).to(x.dtype)


def quick_gelu(x: Tensor) -> Tensor:
    """`x · σ(1.702 x)`: the sigmoid form of GELU (Hendrycks & Gimpel 2016), rounded once."""
    wide = at_least_float32(x)
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """`max(x, 0)²` (So et al. 2021, arXiv 2109.08668), rounded once."""
    return F.relu(x).square()


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": squared_relu,
    "sigmoid": torch.sigmoid,
}


def activation(name: Activation, limit: float | None = None) -> Callable[[Tensor], Tensor]:
    """The activation by name: `silu` x·σ(x), `gelu` x·Φ(x), `gelu_tanh`, `relu` max(x, 0).

    Also `quick_gelu`, `relu2` max(x, 0)², and `sigmoid` σ(x) for gates. With a `limit` the input is
    `min(x, limit)` (gpt-oss).
    """
    plain, number = _FUNCTIONS[name], list(ACTIVATIONS).index(name)
    most = bits(math.inf if limit is None else limit)

    def act(x: Tensor) -> Tensor:
        if compiled.takes(x, narrow=True):
            if x.dtype != torch.float32:
                return compiled.cast(act(compiled.widened(x)), x.dtype)
            rows, out = compiled.in_rows(x), torch.empty(x.shape)
            return call(
                program.ACTIVATE, number, rows, rows.stride(0), out, *rows.shape, most, out=out
            )
        if limit is None:
            return plain(x)
        return plain(at_least_float32(x).clamp(max=limit)).to(x.dtype)  # unrounded limit

    return act
