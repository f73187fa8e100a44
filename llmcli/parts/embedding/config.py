"""What the two ends of a model are. Letters: V vocabulary, D width."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.parts.norm.config import NormConfig


@dataclass(frozen=True, kw_only=True)
class LayerEmbeddingConfig:
    """Embeddings of a token for each of `layers`, `[L, Dp]` (Gemma 3n and 4).

    `(scale · W[id] + norm(E W_proj)) · 2^-½`: a row of a table `[vocab, L·Dp]`, and a projection of
    the token's embedding E, normalized layer by layer. `scale` is rounded as that of the embedding.
    """

    vocab: int
    layers: int
    size: int
    scale: float
    norm: NormConfig


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Token embedding `[V, D]`; `positions` rows of learned position embedding where not None.

    `scale` multiplies a token's row; with `rounded_scale` it is first rounded to the dtype of the
    table, where that has 16 bits. `per_layer` are further ones, which the blocks read.
    """

    positions: int | None = None
    scale: float = 1.0
    rounded_scale: bool = False
    per_layer: LayerEmbeddingConfig | None = None


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Output head `[D, V]`: `tied` reuses the token embedding.

    `scale` multiplies the logits. With a `cap` c they become `c · tanh(logits / c)`.
    """

    tied: bool
    bias: bool = False
    scale: float = 1.0
    cap: float | None = None
