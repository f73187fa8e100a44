"""The slow, obvious twin of every operation here: loops over Python floats, for tests.

Vectors are lists of numbers, matrices lists of rows. Nothing is shared with the fast versions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]
Matrix = Sequence[Vector]


def rms_norm(x: Vector, w: Vector, eps: float) -> list[float]:
    """One row: every number divided by the root of the mean square, times its weight."""
    rms = math.sqrt(math.fsum(a * a for a in x) / len(x) + eps)
    return [a / rms * b for a, b in zip(x, w, strict=True)]


def layer_norm(x: Vector, w: Vector, b: Vector, eps: float) -> list[float]:
    """One row: `scale · (activation - mean) / √(variance + ε) + shift`."""
    mean = math.fsum(x) / len(x)
    variance = math.fsum((a - mean) ** 2 for a in x) / len(x)
    scale = math.sqrt(variance + eps)
    return [(a - mean) / scale * s + shift for a, s, shift in zip(x, w, b, strict=True)]


def silu(x: float) -> float:
    """`x · σ(x)`; its minimum is -0.278 near x = -1.28."""
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


def gelu(x: float) -> float:
    """`x · Φ(x)` with the normal distribution's Φ."""
    return x * 0.5 * math.erfc(-x / math.sqrt(2))


def gelu_tanh(x: float) -> float:
    """The tanh approximation of `x · Φ(x)`."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Vector) -> list[float]:
    """`exp(x_i) / Σ exp(x_j)`, the maximum subtracted first so that nothing overflows."""
    top = max(x)
    powers = [math.exp(a - top) for a in x]
    total = math.fsum(powers)
    return [p / total for p in powers]


def rotate(head: Vector, position: int, frequencies: Vector, factor: float = 1.0) -> list[float]:
    """One head: pair (i, i + N) turned by `position · frequencies[i]` radians, times `factor`."""
    turned = list(head)
    for i, frequency in enumerate(frequencies):
        j = i + len(frequencies)
        cos = math.cos(position * frequency) * factor
        sin = math.sin(position * frequency) * factor
        turned[i] = head[i] * cos - head[j] * sin
        turned[j] = head[j] * cos + head[i] * sin
    return turned


def attend(
    queries: Matrix, keys: Matrix, values: Matrix, *, scale: float, first: int, window: int | None
) -> list[list[float]]:
    """One head, a query at a time: query i stands at position `first + i`, key j at j."""
    out = []
    for i, query in enumerate(queries):
        at = first + i
        start = 0 if window is None else max(0, at - window + 1)
        seen = range(start, min(at + 1, len(keys)))
        scores = [
            scale * math.fsum(a * b for a, b in zip(query, keys[j], strict=True)) for j in seen
        ]
        weights = softmax(scores)
        size = len(values[0])
        out.append(
            [math.fsum(w * values[j][d] for w, j in zip(weights, seen, strict=True))
             for d in range(size)]
        )
    return out
