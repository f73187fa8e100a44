"""Loops over Python's floats for what no op of `llmcli.graph.ops` evaluates, or not step by step.

Nothing is shared with the fast versions. A vector is a list of n numbers.
"""

import math


def soft_cap(x, cap):
    """`cap · tanh(x / cap)`: about x near 0, never beyond ±cap."""
    return cap * math.tanh(x / cap)


def softplus(x):
    """`log(1 + exp(x))` as `max(x, 0) + log(1 + exp(-|x|))`, which cannot overflow.

    That is x, to 2.1e-9, above 20, and exp(x), to a relative 1.1e-9, below -20.
    """
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def l2_norm(x, eps):
    """Every number divided by the length of the row, `√(Σ x² + ε)`: ε is inside the root."""
    length = math.sqrt(math.fsum(a * a for a in x) + eps)
    return [a / length for a in x]


def causal_conv_step(x, ring, position, w, b):
    """The causal convolution of one channel, of the one input at `position`.

    The ring holds the last k - 1 inputs, that at position p in slot p mod (k - 1); it starts as
    zeros. Nothing is ever shifted: `x` replaces the oldest. The last of the k weights belongs to x.
    """
    y = b + w[-1] * x
    for i in range(1, len(w)):
        y += w[len(w) - 1 - i] * ring[(position - i) % len(ring)]
    if ring:
        ring[position % len(ring)] = x
    return y
