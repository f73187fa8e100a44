"""Configuration of a gated short convolution (LFM2, Liquid AI 2025, arXiv 2511.23404)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig:
    """`(C ∘ conv(B ∘ U)) W_out`, where B, C and U are projections of the input.

    The convolution is causal and depthwise: each dimension is a weighted sum over the last `length`
    tokens. `bias`: in all projections and the convolution. `channels`: number of dimensions of B, C
    and U (None: the model's width; fewer in a rank's share).
    """

    length: int
    bias: bool = False
    channels: int | None = None

    AXES = "C channels, L length"
