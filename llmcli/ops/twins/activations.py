"""Non-linearities of one number."""

from __future__ import annotations

import math


def sigmoid(x: float) -> float:
    """`1 / (1 + exp(-x))`, without overflow: for x < 0 multiplied by exp(x) above and below.

    In real numbers it never reaches 0 or 1. In double precision it is 1 from 37 on (1 + exp(-37)
    rounds to 1) and 0 below -745.2 (exp underflows).
    """
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    power = math.exp(x)
    return power / (1 + power)


def silu(x: float) -> float:
    """`x · σ(x)`: no S-curve, it falls to its minimum of -0.278 at x = -1.278 and rises again."""
    return x * sigmoid(x)


def gelu(x: float) -> float:
    """`x · Φ(x)` with the normal distribution's Φ."""
    return x * 0.5 * math.erfc(-x / math.sqrt(2))


def gelu_tanh(x: float) -> float:
    """`0.5 x (1 + tanh(√(2/π)(x + 0.044715 x³)))`: it approximates `x · Φ(x)`, not Φ."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def tanh(x: float) -> float:
    """`(exp(x) - exp(-x)) / (exp(x) + exp(-x))`, written as `2 σ(2x) - 1`, which is the same."""
    return 2 * sigmoid(2 * x) - 1


def soft_cap(x: float, cap: float) -> float:
    """`cap · tanh(x / cap)`: about x near 0, never beyond ±cap."""
    return cap * math.tanh(x / cap)


def softplus(x: float) -> float:
    """`log(1 + exp(x))` as `max(x, 0) + log(1 + exp(-|x|))`, which cannot overflow.

    That is x, to 2.1e-9, above 20, and exp(x), to a relative 1.1e-9, below -20.
    """
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
