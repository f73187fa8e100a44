"""Feed-forward layers, applied to every token separately.

Axes: B batch, T tokens, D width, F hidden.
"""

from __future__ import annotations

from torch import Tensor

from llmcli.config.mlp import MlpConfig
from llmcli.nn.linear import Fused, Linear
from llmcli.nn.parameters import Parameters
from llmcli.nn.step import Step
from llmcli.ops.activations import activation
from llmcli.ops.elements import gate


class Mlp:
    """`act(X W_up + b_up) W_down + b_down` (the seeds' `Activation(X W + B)`)."""

    def __init__(self, config: MlpConfig, name: str, parameters: Parameters) -> None:
        self.name, self.config = name, config
        self.act = activation(config.activation)
        self.up = Linear(parameters, name, "up", bias=config.bias)
        self.down = Linear(parameters, name, "down", bias=config.bias)

    def fuses(self, x_BTD: Tensor) -> bool:
        """Whether kernels of a card support it."""
        return self.up.fuses(x_BTD) and self.down.fuses(x_BTD)

    def __call__(self, x_BTD: Tensor, step: Step, fused: Fused | None = None) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32."""
        if (fused := _fused(self, x_BTD, step, fused)) is not None:
            post_BTF = self.up.fused(x_BTD, norm=fused.norm, hidden=self.config)
            return self.down.fused(post_BTF, onto=fused.onto, wide=True)
        pre_BTF = step.emit(f"{self.name}.pre", self.up(x_BTD))
        post_BTF = step.emit(f"{self.name}.post", self.act(pre_BTF))
        return self.down.wide(post_BTF)


class GatedMlp:
    """`(act(X W_gate) ∘ X W_up) W_down` (Shazeer 2020, arXiv 2002.05202), clamped or not."""

    def __init__(self, config: MlpConfig, name: str, parameters: Parameters) -> None:
        self.name, self.config = name, config
        self.act = activation(
            config.activation, None if config.clamp is None else config.clamp.limit
        )
        self.gate_up = Linear(parameters, name, "gate", "up", bias=config.bias)
        self.down = Linear(parameters, name, "down", bias=config.bias)

    def fuses(self, x_BTD: Tensor) -> bool:
        """Whether kernels of a card support it."""
        return self.gate_up.fuses(x_BTD) and self.down.fuses(x_BTD)

    def __call__(self, x_BTD: Tensor, step: Step, fused: Fused | None = None) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32."""
        if (fused := _fused(self, x_BTD, step, fused)) is not None:
            post_BTF = self.gate_up.fused(x_BTD, norm=fused.norm, hidden=self.config)
            return self.down.fused(post_BTF, onto=fused.onto, wide=True)
        gate_BTF, up_BTF = self.gate_up.split(self.gate_up(x_BTD))
        gate_BTF = step.emit(f"{self.name}.gate", gate_BTF)
        up_BTF = step.emit(f"{self.name}.up", up_BTF)
        act_BTF = step.emit(f"{self.name}.act", self.act(gate_BTF))
        post_BTF = step.emit(f"{self.name}.post", gate(act_BTF, up_BTF, self.config.clamp))
        return self.down.wide(post_BTF)


def _fused(part: Mlp | GatedMlp, x_BTD: Tensor, step: Step, fused: Fused | None) -> Fused | None:
    """What is fused with its products: at least the activation, if unobserved on a card."""
    if fused is None and x_BTD.is_cuda and not step.observed and part.fuses(x_BTD):
        return Fused()
    return fused


def build_mlp(config: MlpConfig, name: str, parameters: Parameters) -> Mlp | GatedMlp:
    """Build a `GatedMlp` if `config.gated`, else an `Mlp`."""
    return (GatedMlp if config.gated else Mlp)(config, name, parameters)
