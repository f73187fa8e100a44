"""The non-linearities of feed-forward layers, element by element."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from llmcli.config import Activation


def gelu_tanh(x: Tensor) -> Tensor:
    """`0.5 x (1 + tanh(√(2/π)(x + 0.044715 x³)))`: the tanh form of GELU (GPT-2, Gemma)."""
    return F.gelu(x, approximate="tanh")


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function of that name: `silu` x·σ(x), `gelu` x·Φ(x), `gelu_tanh`, `relu` max(x, 0)."""
    functions: dict[Activation, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": gelu_tanh,
        "relu": F.relu,
    }
    return functions[name]
