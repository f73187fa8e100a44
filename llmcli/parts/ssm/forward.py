"""Mamba-2 with its projections.

    x ──┬─ W_in ── conv ── SiLU ── x, B, C ─┬─ S ← e^g S + dt B xᵀ; z = SᵀC ── + D x ──∘── norm ── W_out ──
        ├─ W_dt ── softplus ── dt, g ───────┘                                           │
        └─ W_gate ── SiLU ──────────────────────────────────────────────────────────────┘

Axes: B batch, T new tokens, D width, C channels, H heads, G groups, N numbers of B and C of a
group, e values of a head, I of all heads.
"""  # noqa: E501

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from llmcli.nn.linear import Linear
from llmcli.nn.parameters import Parameters
from llmcli.nn.recurrent import Recurrent, in_heads, own_state
from llmcli.nn.state import LayerState
from llmcli.nn.step import Step
from llmcli.ops.activations import softplus
from llmcli.ops.norm import at_least_float32, rms_norm
from llmcli.ops.recurrence import Inputs
from llmcli.parts.norm.forward import Norm
from llmcli.parts.ssm.config import SsmConfig


class Ssm(Recurrent):
    """`norm((z + D x) ∘ SiLU(gate)) W_out`, z what C reads of the state."""

    leaves = ("C", "B", "x", "dt", "log_decay")
    plain, tiled = True, False

    def __init__(self, config: SsmConfig, name: str, parameters: Parameters) -> None:
        self.config, self.name = config, name
        self.dtype = parameters.dtype
        leaves = ("gate", "in", "dt")
        biases = [f"{name}.b_{leaf}" for leaf in leaves] if config.bias else ()
        self.enter = Linear(parameters, [f"{name}.W_{leaf}" for leaf in leaves], biases)
        self.filter_CL = parameters.vector((f"{name}.w",))
        self.bias_C = parameters.vector((f"{name}.b",)) if config.conv_bias else None
        self.A_log_H = parameters.vector((f"{name}.A_log",))
        self.dt_bias_H = parameters.vector((f"{name}.dt_bias",))
        self.D_H = parameters.vector((f"{name}.D",))
        self.norm = Norm(config.norm, f"{name}.norm", parameters)
        self.out = Linear(
            parameters, (f"{name}.W_out",), (f"{name}.b_out",) if config.bias else ()
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, numbers of B and C, and values."""
        return self.config.heads, self.config.state, self.config.head_dim

    def __call__(self, x_BTD: Tensor, state: LayerState | None, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32; the state takes the tokens in."""
        p, own = self.name, own_state(state, self, x_BTD)
        gate_BTI, in_BTC, dt_BTH = self.enter.split(self.enter(x_BTD))
        gate_BHTe = step.emit(f"{p}.gate", in_heads(gate_BTI, self.config.heads))
        in_BTC = step.emit(f"{p}.in", in_BTC)
        dt_BTH = step.emit(f"{p}.dt_in", dt_BTH)
        conv_BTC = step.emit(f"{p}.conv", self.convolved(in_BTC, own, step))
        inputs = self._inputs(step.emit(f"{p}.act", F.silu(conv_BTC)), dt_BTH, step)
        z_BHTe = step.emit(f"{p}.z", self.mixed(inputs, own, step))
        skip_BHTe = z_BHTe + self.D_H[:, None, None] * inputs.v_BHTe
        skip_BHTe = step.emit(f"{p}.skip", skip_BHTe)
        act_BHTe = step.emit(f"{p}.gate_act", F.silu(at_least_float32(gate_BHTe)))
        gated_BHTe = step.emit(f"{p}.gated", act_BHTe * skip_BHTe)
        out_BTI = self._normed(gated_BHTe.transpose(1, 2).flatten(2))
        out_BHTe = step.emit(f"{p}.out", in_heads(out_BTI, self.config.heads))
        return self.out.wide(out_BHTe.transpose(1, 2).flatten(2))

    def _inputs(self, act_BTC: Tensor, dt_BTH: Tensor, step: Step) -> Inputs:
        """What the recurrence reads, in at least float32."""
        p, config = self.name, self.config
        shared = config.groups * config.state
        x, b, c = act_BTC.split_with_sizes([config.inner, shared, shared], -1)
        x_BHTe = at_least_float32(step.emit(f"{p}.x", in_heads(x, config.heads)))
        b_BGTN = at_least_float32(step.emit(f"{p}.B", in_heads(b, config.groups)))
        c_BGTN = at_least_float32(step.emit(f"{p}.C", in_heads(c, config.groups)))
        dt_BTH = softplus(at_least_float32(dt_BTH) + self.dt_bias_H)
        dt_BTH = step.emit(f"{p}.dt", dt_BTH.clamp(config.least, config.most))
        log_BTH = step.emit(f"{p}.log_decay", -self.A_log_H.exp() * dt_BTH)
        return Inputs(
            q_BKTd=c_BGTN, k_BKTd=b_BGTN, v_BHTe=x_BHTe, beta_BHT=dt_BTH.mT,
            log_decay_BHT=log_BTH.mT, plain=True,
        )  # fmt: skip

    def _normed(self, x_BTI: Tensor) -> Tensor:
        """Each group by itself."""
        groups = self.config.groups
        if groups == 1:
            return self.norm(x_BTI)
        assert self.norm.w is not None
        wide_BTGn = rms_norm(x_BTI.view(*x_BTI.shape[:2], groups, -1), None, self.norm.config.eps)
        return (wide_BTGn.flatten(2) * at_least_float32(self.norm.w)).to(self.dtype)
