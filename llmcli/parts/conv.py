"""The gated short convolution.

    x ── W_B|W_gate|W_x ──┬─ B ──┬─ B ∘ U ── conv ── C ∘ ── W_out ──
                          ├─ U ──┘            │      │
                          └─ C ───────────────┴──────┘

Axes: B batch, T new tokens, D width, L tokens of the convolution's window.
"""

from __future__ import annotations

from torch import Tensor

from llmcli.config.conv import ShortConvConfig
from llmcli.nn.linear import Linear
from llmcli.nn.parameters import Parameters
from llmcli.nn.recurrent import convolved
from llmcli.nn.state import LayerState
from llmcli.nn.step import Step
from llmcli.ops.elements import gate


class ShortConv:
    """`(C ∘ conv(B ∘ U)) W_out`."""

    def __init__(self, config: ShortConvConfig, name: str, parameters: Parameters) -> None:
        self.config, self.name = config, name
        self.enter = Linear(parameters, name, "B", "gate", "x", bias=config.bias)
        self.filter_DL = parameters.vector((f"{name}.w",))
        self.bias = parameters.vector((f"{name}.b",)) if config.bias else None
        self.out = Linear(parameters, name, "out", bias=config.bias)

    def __call__(self, x_BTD: Tensor, state: LayerState, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32; stores the last rows in `state`."""
        p, entered = self.name, self.enter.split(self.enter(x_BTD))
        b_BTD, gate_BTD, u_BTD = (
            step.emit(f"{p}.{leaf}", one.to(x_BTD.dtype))
            for leaf, one in zip(("B", "gate", "x"), entered, strict=True)
        )
        y_BTD = step.emit(f"{p}.in", gate(b_BTD, u_BTD))
        z_BTD, _ = convolved(y_BTD, self.filter_DL, self.bias, state["conv"], step)
        out_BTD = step.emit(f"{p}.out", gate(gate_BTD, step.emit(f"{p}.conv", z_BTD)))
        return self.out.wide(out_BTD)
