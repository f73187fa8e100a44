"""What a gated short convolution is (LFM2, Liquid AI 2025, arXiv 2511.23404)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig:
    """`(C ∘ conv(B ∘ U)) W_out`, where B, C and U are projections of what enters.

    The convolution is causal and depthwise: each dimension of a token is a weighted sum of the last
    `length` tokens'. With `bias` all projections and the convolution have one.
    """

    length: int
    bias: bool = False
