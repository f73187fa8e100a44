"""Configuration of the embeddings and the output head. Letters: V vocabulary, D width."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.config.norm import NormConfig


@dataclass(frozen=True, kw_only=True)
class LayerEmbeddingConfig:
    """Per-layer embeddings of a token, `[L, Dp]` (Gemma 3n and 4).

    `(scale · W[id] + norm(E W_proj)) · 2^-½`: a row of a table `[vocab, L·Dp]` plus a projection of
    the token's embedding E, normalized per layer. `scale` is rounded like the embedding's.
    """

    vocab: int
    layers: int
    size: int
    scale: float
    norm: NormConfig


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Token embedding `[V, D]`; `positions`: rows of learned position embeddings, if any.

    `size`: the columns De of a table `[V, De]`, whose rows are projected to D, as the final norm's
    output is to De for the head (OPT 350M). `scale` multiplies a token's row; with `rounded_scale`
    it is first rounded to the table's dtype if that has 16 bits. `norm` normalizes it (BLOOM).
    `per_layer`: additional embeddings read by the blocks.
    """

    positions: int | None = None
    size: int | None = None
    scale: float = 1.0
    rounded_scale: bool = False
    norm: NormConfig | None = None
    per_layer: LayerEmbeddingConfig | None = None

    @property
    def residual_updates(self) -> tuple[str, ...]:
        """The tensors whose sum enters the first block."""
        token = "embed" if self.size is None else "embed_proj"
        token = token if self.norm is None else "embed_norm.out"
        return (token,) if self.positions is None else (token, "pos_embed")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Output head `[D, V]`: `tied` reuses the token embedding.

    `scale` multiplies the logits. With a `cap` c they become `c · tanh(logits / c)`. Raises
    ValueError for both: no model has both.
    """

    tied: bool
    bias: bool = False
    scale: float = 1.0
    cap: float | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and self.scale != 1:
            raise ValueError("logits are either scaled or capped")
