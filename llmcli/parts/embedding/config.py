"""What the two ends of a model are. Letters: V vocabulary, D width."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Token embedding `[V, D]`; `positions` rows of learned position embedding where not None."""

    positions: int | None = None


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Output head `[D, V]`: `tied` reuses the token embedding."""

    tied: bool
    bias: bool = False
