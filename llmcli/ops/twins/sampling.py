"""Choosing a token from a row of logits, filter by filter.

A logit of -∞ is a token that cannot be drawn; a softmax over the rest renormalizes it.
"""

from __future__ import annotations

import math

from llmcli.ops.twins.attention import softmax
from llmcli.ops.twins.vectors import Vector


def argmax(x: Vector) -> int:
    """The index of the greatest number, in one pass; of equals the lowest."""
    best = 0
    for i in range(1, len(x)):
        if x[i] > x[best]:
            best = i
    return best


def temperature(logits: Vector, t: float) -> list[float]:
    """`logits / t` for t > 0: towards 0 the best takes all, 1 changes nothing, ∞ is uniform."""
    return [x / t for x in logits]


def ranked(x: Vector) -> list[int]:
    """All indices, greatest number first; of equals the lowest index first."""
    return sorted(range(len(x)), key=lambda i: (-x[i], i))


def top_k(logits: Vector, k: int) -> list[float]:
    """The k greatest logits stay (k ≥ 1), the others become -∞."""
    kept = ranked(logits)[:k]
    return [x if i in kept else -math.inf for i, x in enumerate(logits)]


def top_p(logits: Vector, p: float) -> list[float]:
    """The fewest best tokens whose probabilities reach p stay (0 < p ≤ 1), the others become -∞.

    The token that crosses the line stays, so that at least one does.
    """
    probabilities = softmax(logits)
    kept, reached = [], 0.0
    for i in ranked(logits):
        kept.append(i)
        reached += probabilities[i]
        if reached >= p:
            break
    return [x if i in kept else -math.inf for i, x in enumerate(logits)]
