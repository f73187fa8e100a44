"""Configuration of a Mamba-2 mixer (Dao & Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmcli.config.norm import NormConfig


@dataclass(frozen=True, kw_only=True)
class SsmConfig:
    """`S ← e^(−dt · e^A_log) S + dt · B xᵀ; y = Sᵀ C + D x`, for each of H heads.

    Each head has `head_dim` values and its own decay; B and C, of size `state`, are shared by the
    heads of a group: head h reads group ⌊h / (H / groups)⌋. x, B and C pass a causal convolution
    over `length` tokens and SiLU. `least` and `most` bound dt after the softplus. The output times
    SiLU(gate) is normalized per group. `bias`: of all projections; `conv_bias`: of the convolution.
    Raises ValueError if groups do not divide heads.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    length: int
    norm: NormConfig
    least: float = 0.0
    most: float = math.inf
    bias: bool = False
    conv_bias: bool = True

    AXES = "H heads, G groups, N state, dv head_dim, L length"
    CHANNELS = "H·dv|G·N|G·N"  # x, B and C

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"{self.groups} groups do not divide {self.heads} heads")

    @property
    def inner(self) -> int:
        """Total size of all heads."""
        return self.heads * self.head_dim

    @property
    def segments(self) -> tuple[int, int, int]:
        """Sizes in the channels of x, B and C, concatenated."""
        shared = self.groups * self.state
        return self.inner, shared, shared

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return sum(self.segments)
