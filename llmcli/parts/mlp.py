"""Feed-forward layers, applied to every token separately.

Axes: B batch, T tokens, D width, F hidden.
"""

from __future__ import annotations

from torch import Tensor

from llmcli.config.mlp import MlpConfig
from llmcli.nn.linear import Linear
from llmcli.nn.parameters import Parameters
from llmcli.nn.step import Step
from llmcli.ops import on_card
from llmcli.ops.activations import activation
from llmcli.ops.elements import gate
from llmcli.weights.dense import Dense


class Mlp:
    """`act(X W_up + b_up) W_down + b_down` (the seeds' `Activation(X W + B)`)."""

    def __init__(self, config: MlpConfig, name: str, parameters: Parameters) -> None:
        self.name = name
        self.act = activation(config.activation)
        self.up = Linear(parameters, name, "up", bias=config.bias)
        self.down = Linear(parameters, name, "down", bias=config.bias)

    def __call__(self, x_BTD: Tensor, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32."""
        pre_BTF = step.emit(f"{self.name}.pre", self.up(x_BTD))
        post_BTF = step.emit(f"{self.name}.post", self.act(pre_BTF))
        return self.down.wide(post_BTF)


class GatedMlp:
    """`(act(X W_gate) ∘ X W_up) W_down` (Shazeer 2020, arXiv 2002.05202), clamped or not."""

    def __init__(self, config: MlpConfig, name: str, parameters: Parameters) -> None:
        self.name, self.clamp, self.activation = name, config.clamp, config.activation
        self.act = activation(
            config.activation, None if config.clamp is None else config.clamp.limit
        )
        self.gate_up = Linear(parameters, name, "gate", "up", bias=config.bias)
        self.down = Linear(parameters, name, "down", bias=config.bias)

    def __call__(self, x_BTD: Tensor, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32."""
        if x_BTD.is_cuda and self.clamp is None and not step.observed:
            weight, bias = self.gate_up.weight, self.gate_up.bias
            if isinstance(weight, Dense) and on_card.gates(x_BTD, weight.tensor, self.activation):
                gated = x_BTD, weight.tensor, bias, x_BTD.dtype, self.activation
                return self.down.wide(on_card.product(*gated))
        gate_BTF, up_BTF = self.gate_up.split(self.gate_up(x_BTD))
        gate_BTF = step.emit(f"{self.name}.gate", gate_BTF)
        up_BTF = step.emit(f"{self.name}.up", up_BTF)
        act_BTF = step.emit(f"{self.name}.act", self.act(gate_BTF))
        post_BTF = step.emit(f"{self.name}.post", gate(act_BTF, up_BTF, self.clamp))
        return self.down.wide(post_BTF)


def build_mlp(config: MlpConfig, name: str, parameters: Parameters) -> Mlp | GatedMlp:
    """Build a `GatedMlp` if `config.gated`, else an `Mlp`."""
    return (GatedMlp if config.gated else Mlp)(config, name, parameters)
