"""Mamba-2 with its projections.

    x ──┬─ W_in ── conv ── SiLU ── x, B, C ─┬─ S ← e^g S + dt B xᵀ; z = SᵀC ── + D x ──∘── norm ── W_out ──
        ├─ W_dt ── softplus ── dt, g ───────┘                                           │
        └─ W_gate ── SiLU ──────────────────────────────────────────────────────────────┘

Axes: B batch, T new tokens, D width, C channels, H heads, G groups, N size of B and C per group, e
size of a head, I of all heads. """  # noqa: E501

from __future__ import annotations

from torch import Tensor

from llmcli.config.ssm import SsmConfig
from llmcli.nn.linear import Linear
from llmcli.nn.parameters import Parameters
from llmcli.nn.recurrent import Recurrent, in_heads, side_by_side
from llmcli.nn.state import LayerState
from llmcli.nn.step import Step
from llmcli.ops.activations import activation
from llmcli.ops.elements import gate
from llmcli.ops.norm import at_least_float32, rms_norm
from llmcli.ops.recurrence import Inputs, with_skip
from llmcli.parts.norm import Norm


class Ssm(Recurrent):
    """`norm((z + D x) ∘ SiLU(gate)) W_out`, z read from the state by C."""

    leaves = ("C", "B", "x", "dt", "log_decay")
    plain, tiled = True, False

    def __init__(self, config: SsmConfig, name: str, parameters: Parameters) -> None:
        self.config, self.name = config, name
        self.dtype = parameters.dtype
        self.enter = Linear(parameters, name, "gate", "in", "dt", bias=config.bias)
        self.filter_CL = parameters.vector((f"{name}.w",))
        self.bias_C = parameters.vector((f"{name}.b",)) if config.conv_bias else None
        self.A_log_H = parameters.vector((f"{name}.A_log",))
        self.dt_bias_H = parameters.vector((f"{name}.dt_bias",))
        self.D_H = parameters.vector((f"{name}.D",))
        self.norm = Norm(config.norm, f"{name}.norm", parameters)
        self.out = Linear(parameters, name, "out", bias=config.bias)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, size of B and C, size of a value."""
        return self.config.heads, self.config.state, self.config.head_dim

    def __call__(self, x_BTD: Tensor, state: LayerState, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32; updates `state`."""
        p = self.name
        gate_BTI, in_BTC, dt_BTH = self.enter.split(self.enter(x_BTD))
        gate_BHTe = step.emit(f"{p}.gate", in_heads(gate_BTI, self.config.heads))
        in_BTC = step.emit(f"{p}.in", in_BTC)
        dt_BTH = step.emit(f"{p}.dt_in", dt_BTH)
        inputs = self._inputs(self.activated(in_BTC, state, step), dt_BTH, step)
        z_BHTe = step.emit(f"{p}.z", self.mixed(inputs, state, step))
        skip_BHTe = step.emit(f"{p}.skip", with_skip(z_BHTe, inputs.v_BHTe, self.D_H))
        act_BTI = activation("silu")(at_least_float32(side_by_side(gate_BHTe)))
        act_BHTe = step.emit(f"{p}.gate_act", in_heads(act_BTI, self.config.heads))
        gated_BTI = gate(side_by_side(act_BHTe), side_by_side(skip_BHTe))
        gated_BHTe = step.emit(f"{p}.gated", in_heads(gated_BTI, self.config.heads))
        out_BTI = self._normed(side_by_side(gated_BHTe))
        out_BHTe = step.emit(f"{p}.out", in_heads(out_BTI, self.config.heads))
        return self.out.wide(side_by_side(out_BHTe))

    def _inputs(self, act_BTC: Tensor, dt_BTH: Tensor, step: Step) -> Inputs:
        """The recurrence's inputs, in at least float32."""
        p, config = self.name, self.config
        x, b, c = act_BTC.split_with_sizes(config.segments, -1)
        x_BHTe = at_least_float32(step.emit(f"{p}.x", in_heads(x, config.heads)))
        b_BGTN = at_least_float32(step.emit(f"{p}.B", in_heads(b, config.groups)))
        c_BGTN = at_least_float32(step.emit(f"{p}.C", in_heads(c, config.groups)))
        dt_BTH, log_BTH = self.decays(dt_BTH, step, least=config.least, most=config.most)
        return self.inputs(c_BGTN, b_BGTN, x_BHTe, dt_BTH, log_BTH)

    def _normed(self, x_BTI: Tensor) -> Tensor:
        """Normalize each group separately."""
        groups = self.config.groups
        if groups == 1:
            return self.norm(x_BTI)
        assert self.norm.w is not None
        norm, w_Gn = self.norm.config, self.norm.w.view(groups, -1)
        x_BTGn = x_BTI.view(*x_BTI.shape[:2], groups, -1)
        return rms_norm(x_BTGn, w_Gn, norm.eps, self.dtype, offset=norm.offset).flatten(2)
