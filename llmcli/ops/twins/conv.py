"""The causal convolution of one channel, from its formula and with a ring buffer.

Weights are in the checkpoint's order: the last of the k belongs to the current input.
"""

from __future__ import annotations

from llmcli.ops.twins.vectors import Vector


def causal_conv(x: Vector, w: Vector, b: float = 0.0) -> list[float]:
    """`y[t] = b + Σ_i w[k-1-i] · x[t-i]`, nothing where t - i < 0: `[T]` → `[T]`."""
    out = []
    for t in range(len(x)):
        y = b
        for i in range(min(len(w), t + 1)):
            y += w[len(w) - 1 - i] * x[t - i]
        out.append(y)
    return out


def causal_conv_step(x: float, ring: list[float], position: int, w: Vector, b: float) -> float:
    """The same for the one input at `position`, which then replaces the oldest in `ring`.

    The ring holds the last k - 1 inputs, that at position p in slot p mod (k - 1); it starts as
    zeros. Nothing is ever shifted.
    """
    y = b + w[-1] * x
    for i in range(1, len(w)):
        y += w[len(w) - 1 - i] * ring[(position - i) % len(ring)]
    if ring:
        ring[position % len(ring)] = x
    return y
