"""Configuration of the block part that uses per-layer embeddings (Gemma 3n and 4)."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.config.mlp import Activation


@dataclass(frozen=True, kw_only=True)
class PleConfig:
    """`(act(X W_gate) ∘ E_i) W_out`: E_i is the token's embedding of `size` for layer i.

    See `LayerEmbeddingConfig`.
    """

    size: int
    activation: Activation

    AXES = "Dp size"
