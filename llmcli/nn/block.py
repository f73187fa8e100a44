"""One layer of the decoder.

    x ──┬── ln1 ── mixer ──(+)──┬── ln2 ── feed-forward ──(+)── out
        └───────────────────────┘ └────────────────────────────┘
"""

from __future__ import annotations

from torch import Tensor

from llmcli.config import LayerConfig
from llmcli.nn.attention import Attention
from llmcli.nn.mlp import GatedMlp, Mlp
from llmcli.nn.norm import Norm
from llmcli.nn.parameters import Parameters
from llmcli.nn.state import LayerState
from llmcli.nn.step import Step


class Block:
    """`x + mixer(ln1(x))`, then `x + ffn(ln2(x))`, the stream x in at least float32."""

    def __init__(self, config: LayerConfig, name: str, parameters: Parameters) -> None:
        self.name = name
        self.ln1 = Norm(config.ln1, f"{name}.ln1", parameters)
        self.mixer = Attention(config.mixer, f"{name}.attn", parameters)
        self.ln2 = Norm(config.ln2, f"{name}.ln2", parameters)
        ffn = GatedMlp if config.ffn.gated else Mlp
        self.ffn = ffn(config.ffn, f"{name}.mlp", parameters)

    def __call__(self, x_BTD: Tensor, cache: LayerState | None, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]`."""
        x_BTD = step.emit(f"{self.name}.resid_pre", x_BTD)
        attn_out = self.mixer(self.ln1.observed(x_BTD, step), cache, step)
        attn_out = step.emit(f"{self.name}.attn_out", attn_out)
        mid_BTD = step.emit(f"{self.name}.resid_mid", x_BTD + attn_out)
        mlp_out = self.ffn(self.ln2.observed(mid_BTD, step), step)
        mlp_out = step.emit(f"{self.name}.mlp_out", mlp_out)
        return step.emit(f"{self.name}.resid_post", mid_BTD + mlp_out)
