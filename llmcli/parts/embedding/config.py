"""What the two ends of a model are. Letters: V vocabulary, D width."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Token embedding `[V, D]`; `positions` rows of learned position embedding where not None.

    `scale` multiplies a token's row; with `rounded_scale` it is first rounded to the dtype of the
    table, where that has 16 bits.
    """

    positions: int | None = None
    scale: float = 1.0
    rounded_scale: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Output head `[D, V]`: `tied` reuses the token embedding.

    `scale` multiplies the logits. With a `cap` c they become `c · tanh(logits / c)`.
    """

    tied: bool
    bias: bool = False
    scale: float = 1.0
    cap: float | None = None
