"""One layer of the decoder.

    x ──┬── ln1 ── mixer ──(+)──┬── ln2 ── feed-forward ──(+)── out
        └───────────────────────┘ └────────────────────────────┘
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from llmcli.config import LayerConfig
from llmcli.nn.parameters import Parameters
from llmcli.nn.state import LayerState
from llmcli.nn.step import Step
from llmcli.parts.norm.forward import Norm
from llmcli.parts.registry import forward_of


class Mixer(Protocol):
    """What lets tokens see each other: a part with a state, which can be seen as attention."""

    name: str

    def new_state(
        self, batch: int, capacity: int, *, device: torch.device, dtype: torch.dtype
    ) -> LayerState:
        """An empty state for `batch` sequences of up to `capacity` tokens."""
        ...

    def __call__(self, x_BTD: Tensor, state: LayerState | None, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32; the state grows by the new tokens."""
        ...

    def score_rows(self, q_BHtd: Tensor, k_BKSd: Tensor, first: int) -> Tensor:
        """Scores `[B, H, t, S]` of the queries at positions `first` … `first`+t-1."""
        ...

    def attention_rows(self, q_BHtd: Tensor, k_BKSd: Tensor, first: int) -> Tensor:
        """Their attention pattern."""
        ...

    def head_share(self, z_BHTe: Tensor, head: int) -> Tensor:
        """What one head adds to the output: `[B, T, D]`."""
        ...


class FeedForward(Protocol):
    """What is applied to every token alone."""

    def __call__(self, x_BTD: Tensor, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32."""
        ...


class Block:
    """`x + mixer(ln1(x))`, then `x + ffn(ln2(x))`, the stream x in at least float32."""

    def __init__(self, config: LayerConfig, name: str, parameters: Parameters) -> None:
        self.name = name
        self.ln1 = Norm(config.ln1, f"{name}.ln1", parameters)
        self.mixer: Mixer = forward_of(config.mixer, f"{name}.attn", parameters)
        self.ln2 = Norm(config.ln2, f"{name}.ln2", parameters)
        self.ffn: FeedForward = forward_of(config.ffn, f"{name}.mlp", parameters)

    def __call__(self, x_BTD: Tensor, cache: LayerState | None, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]`."""
        x_BTD = step.emit(f"{self.name}.resid_pre", x_BTD)
        attn_out = self.mixer(self.ln1.observed(x_BTD, step), cache, step)
        attn_out = step.emit(f"{self.name}.attn_out", attn_out)
        mid_BTD = step.emit(f"{self.name}.resid_mid", x_BTD + attn_out)
        mlp_out = self.ffn(self.ln2.observed(mid_BTD, step), step)
        mlp_out = step.emit(f"{self.name}.mlp_out", mlp_out)
        return step.emit(f"{self.name}.resid_post", mid_BTD + mlp_out)
