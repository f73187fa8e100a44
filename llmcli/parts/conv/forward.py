"""The gated short convolution.

    x ── W_B|W_gate|W_x ──┬─ B ──┬─ B ∘ U ── conv ── C ∘ ── W_out ──
                          ├─ U ──┘            │      │
                          └─ C ───────────────┴──────┘

Axes: B batch, T new tokens, D width, L tokens that the convolution sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcli.nn.linear import Linear
from llmcli.nn.parameters import Parameters
from llmcli.nn.state import FixedState, LayerState
from llmcli.nn.step import Step
from llmcli.ops.norm import at_least_float32
from llmcli.parts.conv.config import ShortConvConfig


class ShortConv:
    """`(C ∘ conv(B ∘ U)) W_out`."""

    def __init__(self, config: ShortConvConfig, name: str, parameters: Parameters) -> None:
        self.config, self.name = config, name
        leaves = ("B", "gate", "x")
        self.enter = Linear(
            parameters,
            [f"{name}.W_{leaf}" for leaf in leaves],
            [f"{name}.b_{leaf}" for leaf in leaves] if config.bias else (),
        )
        self.filter = parameters.vector((f"{name}.w",))
        self.bias = parameters.vector((f"{name}.b",)) if config.bias else None
        out_bias = (f"{name}.b_out",) if config.bias else ()
        self.out = Linear(parameters, (f"{name}.W_out",), out_bias)

    def new_state(
        self, batch: int, capacity: int, *, device: torch.device, dtype: torch.dtype
    ) -> FixedState:
        """`conv` `[B, L-1, D]`: the last rows of every sequence."""
        shape = (batch, self.config.length - 1, self.filter.shape[0])
        return FixedState(conv=torch.zeros(shape, device=device, dtype=dtype))

    def __call__(self, x_BTD: Tensor, state: LayerState | None, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32; the state keeps the last rows."""
        p, entered = self.name, self.enter.split(self.enter(x_BTD))
        b_BTD, gate_BTD, u_BTD = (
            step.emit(f"{p}.{leaf}", one.to(x_BTD.dtype))
            for leaf, one in zip(("B", "gate", "x"), entered, strict=True)
        )
        y_BTD = step.emit(f"{p}.in", b_BTD * u_BTD)
        if state is None:
            state = self.new_state(len(y_BTD), 0, device=y_BTD.device, dtype=y_BTD.dtype)
        assert isinstance(state, FixedState)
        rows_BSD = torch.cat((state["conv"], y_BTD), 1)
        _remember(state["conv"], rows_BSD, step.lengths)
        z_BTD = step.emit(f"{p}.conv", self._convolve(rows_BSD).to(y_BTD.dtype))
        out_BTD = step.emit(f"{p}.out", gate_BTD * z_BTD)
        return self.out.wide(out_BTD)

    def _convolve(self, rows_BSD: Tensor) -> Tensor:
        """`[B, L-1+T, D]` → `[B, T, D]` in at least float32."""
        rows_BSD, w_DL = at_least_float32(rows_BSD), at_least_float32(self.filter)
        tokens = rows_BSD.shape[1] - self.config.length + 1
        z_BTD = rows_BSD[:, :tokens] * w_DL[:, 0]
        for j in range(1, self.config.length):
            z_BTD += rows_BSD[:, j : j + tokens] * w_DL[:, j]
        return z_BTD if self.bias is None else z_BTD + at_least_float32(self.bias)


def _remember(held_BLD: Tensor, rows_BSD: Tensor, lengths: Sequence[int]) -> None:
    """The last rows of each sequence: those that were held, then `lengths[b]` new ones, padding."""
    held = held_BLD.shape[1]
    for row in (slice(None),) if len(set(lengths)) == 1 else range(len(lengths)):
        length = lengths[0 if isinstance(row, slice) else row]
        held_BLD[row] = rows_BSD[row][..., length : length + held, :]
