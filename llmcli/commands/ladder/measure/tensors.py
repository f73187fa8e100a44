"""What the rungs from 2 on do with tensors: the same formulas for one row and for many."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.commands.ladder.measure import notation
from llmcli.commands.ladder.measure.trace import Show
from llmcli.commands.ladder.measure.weights import NormWeights
from llmcli.parts.attention.config import QueryGrowth


def normalized(y: str, x: str, X: Tensor, norm: NormWeights, show: Show, axes: str) -> Tensor:
    """Each row: `(x - mean) / √(variance + ε) · w + b`; RMSNorm without the mean.

    `axes` are the letters of X; a mean of a single row is a number.
    """
    config = norm.config
    mean_formula, square_formula, formula = notation.norm_formulas(y, x, config)
    before, _, _ = axes.rpartition(" × ")
    one = f"{before} × 1" if before else ""
    if config.kind == "layer":
        mean = X.mean(-1, keepdim=True)
        show(mean_formula, mean if before else mean[0], one)
        X = X - mean
    square = (X * X).mean(-1, keepdim=True)
    show(square_formula, square if before else square[0], one)
    Y = X / (square + config.eps).sqrt()
    if (factor := norm.factor) is not None:
        Y = factor * Y
    if norm.b is not None:
        Y = Y + norm.b
    show(formula, Y, axes)
    return Y


def rotated(X: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each head's first numbers rotated, the two halves against each other; the rest stays.

    `X` `[…, d/h]`, `cos` and `sin` `[…, R/2]`.
    """
    half = cos.shape[-1]
    a, b, rest = X[..., :half], X[..., half : 2 * half], X[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def growth(by: QueryGrowth, positions: Tensor, like: Tensor) -> Tensor:
    """`1 + β ln(1 + ⌊p / original⌋)` of each position p, in the dtype of `like`."""
    steps = torch.div(positions, by.original, rounding_mode="floor").double()
    return (1 + by.beta * torch.log1p(steps)).to(like)


def softmax(scores: Tensor, sink: Tensor | None = None) -> Tensor:
    """Each row `exp(s) / Σ exp(s)`; its largest is subtracted first so that nothing overflows.

    A `sink` `[…, 1, 1]` is one score more in the sum of each row.
    """
    largest = scores.max(-1, keepdim=True).values
    if sink is not None:
        largest = torch.maximum(largest, sink)
    powers = (scores - largest).exp()
    total = powers.sum(-1, keepdim=True)
    return powers / (total if sink is None else total + (sink - largest).exp())


def mask(n: int, window: int | None) -> Tensor:
    """M `[n, n]`: −∞ where key j is after query i, or a whole window before it; 0 elsewhere."""
    hidden = torch.full((n, n), -torch.inf)
    return hidden.triu(1) if window is None else hidden.triu(1) + hidden.tril(-window)
