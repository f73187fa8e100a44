"""Configuration of gated DeltaNet (Yang, Kautz & Hatamizadeh 2024, arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.config.norm import NormConfig


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """`S ← e^g S; S ← S + β k (v − kᵀS); o = qᵀS`, per value head (H), with Hk key heads.

    Queries, keys and values pass a causal convolution over `length` tokens and SiLU; queries and
    keys are then normalized to length 1 (with `eps` in the root), and queries divided by √key_dim.
    Value head h reads key head ⌊h / (H / Hk)⌋, or h mod Hk if `tiled`, the order of some llama.cpp
    files. `norm`: of each head's output, before its gate. Raises ValueError if key heads do not
    divide value heads.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    length: int
    norm: NormConfig
    eps: float = 1e-6
    tiled: bool = False

    AXES = "H heads, Hk key_heads, dk key_dim, dv value_dim, L length"
    CHANNELS = "Hk·dk|Hk·dk|H·dv"  # queries, keys and values

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise ValueError(f"{self.key_heads} key heads do not divide {self.heads} value heads")

    @property
    def segments(self) -> tuple[int, int, int]:
        """Sizes in the channels of queries, keys and values, concatenated."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return sum(self.segments)
