"""Gated DeltaNet with its projections.

    x ──┬─ W_in ──── conv ── SiLU ──┬─ q, k: length 1 ─┬─ S ← e^g S; S += β k (v − kᵀS); z = Sᵀq ─ norm ─∘─ W_out ──
        │                           └─ v ──────────────┤                                                 │
        ├─ W_beta ── σ ─────────────────────── β ──────┤                                                 │
        ├─ W_decay ─ softplus ─ −e^A_log · ─── g ──────┘                                                 │
        └─ W_gate ── SiLU ───────────────────────────────────────────────────────────────────────────────┘

Axes: B batch, T new tokens, D width, C channels, H value heads, K key heads, d size of a query and
key, e of a value.
"""  # noqa: E501

from __future__ import annotations

from torch import Tensor

from llmcli.config.delta import DeltaConfig
from llmcli.nn.linear import Linear
from llmcli.nn.parameters import Parameters
from llmcli.nn.recurrent import Recurrent, in_heads, side_by_side
from llmcli.nn.state import LayerState
from llmcli.nn.step import Step
from llmcli.ops.activations import activation
from llmcli.ops.elements import gate
from llmcli.ops.norm import at_least_float32, l2_norm
from llmcli.ops.recurrence import Inputs
from llmcli.parts.norm import Norm


class GatedDelta(Recurrent):
    """`(SiLU(gate) ∘ norm(z)) W_out`, z read from the state by the queries."""

    leaves = ("q", "k", "v", "beta", "log_decay")
    plain = False

    def __init__(self, config: DeltaConfig, name: str, parameters: Parameters) -> None:
        self.config, self.name, self.tiled = config, name, config.tiled
        self.dtype = parameters.dtype
        self.enter = Linear(parameters, name, "in", "gate", "beta", "decay")
        self.filter_CL = parameters.vector((f"{name}.w",))
        self.A_log_H = parameters.vector((f"{name}.A_log",))
        self.dt_bias_H = parameters.vector((f"{name}.dt_bias",))
        self.norm = Norm(config.norm, f"{name}.norm", parameters, wide=True)
        self.out = Linear(parameters, name, "out")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Value heads, key size, value size."""
        return self.config.heads, self.config.key_dim, self.config.value_dim

    def __call__(self, x_BTD: Tensor, state: LayerState, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32; updates `state`."""
        p = self.name
        entered = self.enter.split(self.enter(x_BTD))
        in_BTC, gate_BTV, beta_BTH, decay_BTH = entered
        in_BTC = step.emit(f"{p}.in", in_BTC)
        gate_BHTe = step.emit(f"{p}.gate", in_heads(gate_BTV, self.config.heads))
        beta_BTH = step.emit(f"{p}.beta_in", beta_BTH)
        decay_BTH = step.emit(f"{p}.decay_in", decay_BTH)
        act_BTC = self.activated(in_BTC, state, step)
        inputs = self._inputs(act_BTC, beta_BTH, decay_BTH, step)
        z_BHTe = step.emit(f"{p}.z", self.mixed(inputs, state, step))
        z_BHTe = self.norm(z_BHTe.transpose(1, 2)).transpose(1, 2)
        z_BHTe = step.emit(f"{p}.z_norm", z_BHTe)
        act_BTV = activation("silu")(at_least_float32(side_by_side(gate_BHTe)))
        act_BHTe = step.emit(f"{p}.gate_act", in_heads(act_BTV, self.config.heads))
        out_BTV = gate(side_by_side(act_BHTe), side_by_side(z_BHTe)).to(self.dtype)
        out_BHTe = step.emit(f"{p}.out", in_heads(out_BTV, self.config.heads))
        return self.out.wide(side_by_side(out_BHTe))

    def _inputs(self, act_BTC: Tensor, beta_BTH: Tensor, decay_BTH: Tensor, step: Step) -> Inputs:
        """The recurrence's inputs, in at least float32."""
        p, config = self.name, self.config
        q, k, v = act_BTC.split_with_sizes(config.segments, -1)
        q_BTKd, k_BTKd = (
            at_least_float32(one).view(*one.shape[:2], config.key_heads, -1) for one in (q, k)
        )
        q_BTKd = l2_norm(q_BTKd, config.eps, config.key_dim**-0.5)
        q_BKTd = step.emit(f"{p}.q", q_BTKd.transpose(1, 2))
        k_BKTd = step.emit(f"{p}.k", l2_norm(k_BTKd, config.eps).transpose(1, 2))
        v_BHTe = step.emit(f"{p}.v", in_heads(v, config.heads))
        beta_BTH = step.emit(f"{p}.beta", activation("sigmoid")(at_least_float32(beta_BTH)))
        _, log_BTH = self.decays(decay_BTH, step)
        return self.inputs(q_BKTd, k_BKTd, at_least_float32(v_BHTe), beta_BTH, log_BTH)
