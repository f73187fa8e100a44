"""What the rungs from 2 on do with tensors: the same arithmetic for one row and for many."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.record import shown, shown_last
from llmcli.commands.ladder.measure.weights import NormWeights
from llmcli.parts.attention.config import QueryGrowth


@shown_last
def normalized(x_ni: Tensor, norm: NormWeights) -> Tensor:
    """Each row: LayerNorm `(x − μ)/√(σ² + ε) · w + b`, RMSNorm `x/√(mean(x²) + ε) · w`."""
    if norm.config.kind == "layer":
        mean_n1 = x_ni.mean(-1, keepdim=True)  # μ
        x_ni = x_ni - mean_n1
    square_n1 = (x_ni * x_ni).mean(-1, keepdim=True)  # σ², or mean(x²)
    y_ni = x_ni / (square_n1 + norm.config.eps).sqrt()
    if (factor := norm.factor) is not None:
        y_ni = factor * y_ni  # · w
    if norm.b is not None:
        y_ni = y_ni + norm.b
    return y_ni


@shown
def rotated(x_nk: Tensor, cos_nj: Tensor, sin_nj: Tensor) -> Tensor:
    """R(position) x: two halves of a head turned against each other, the rest as it is."""
    half = cos_nj.shape[-1]
    a, b, rest = x_nk.tensor_split((half, 2 * half), -1)
    y_nk = torch.cat((a * cos_nj - b * sin_nj, b * cos_nj + a * sin_nj, rest), -1)
    return y_nk


def growth(by: QueryGrowth, positions: Tensor, like: Tensor) -> Tensor:
    """`1 + β ln(1 + ⌊p / original⌋)` of each position p, in the dtype of `like`."""
    steps = torch.div(positions, by.original, rounding_mode="floor").double()
    return (1 + by.beta * torch.log1p(steps)).to(like)


@shown_last
def softmax(s_nm: Tensor, sink: Tensor | None = None) -> Tensor:
    """Each row `exp(s) / Σ exp(s)`; its largest is subtracted first so that nothing overflows.

    A `sink` `[…, 1, 1]` is one score more in the sum of each row.
    """
    largest = s_nm.max(-1, keepdim=True).values
    if sink is not None:
        largest = torch.maximum(largest, sink)
    p_nm = (s_nm - largest).exp()
    sum_n1 = p_nm.sum(-1, keepdim=True)
    if sink is not None:
        sum_n1 = sum_n1 + (sink - largest).exp()
    return p_nm / sum_n1


def mask(n: int, window: int | None) -> Tensor:
    """M `[n, n]`: −∞ where key j is after query i, or a whole window before it; 0 elsewhere."""
    hidden = torch.full((n, n), -torch.inf)
    return hidden.triu(1) if window is None else hidden.triu(1) + hidden.tril(-window)
