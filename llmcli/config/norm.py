"""Configuration of a normalization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Normalization of the last axis: `rms` (Zhang & Sennrich 2019), `layer` (Ba et al. 2016).

    The result is multiplied by `offset + w` (1 + w in Gemma 1 to 3, whose weights are near 0) if it
    has `weights`.
    """

    kind: Literal["rms", "layer"]
    eps: float
    bias: bool = False
    offset: float = 0.0
    weights: bool = True


@dataclass(frozen=True, kw_only=True)
class JoinedNorm(NormConfig):
    """Of queries or keys: over all heads of a token together (OLMo 2)."""


@dataclass(frozen=True, kw_only=True)
class HeadNorm(NormConfig):
    """Of queries or keys: each head with weights of its own (StableLM 2 12B), without a bias."""

    def __post_init__(self) -> None:
        """Raise ValueError if it has a bias."""
        if self.bias:
            raise ValueError("a norm with weights for each head has no bias")
