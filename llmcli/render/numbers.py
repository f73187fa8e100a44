"""Numbers in few characters."""

from __future__ import annotations


def scaled(value: float) -> str:
    """`37`, `0.25`, `36.2 M`: three digits and a unit's prefix."""
    scales = ((" P", 1e15), (" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3))
    for prefix, scale in scales:
        if value >= scale * 0.9995:
            return f"{value / scale:.3g}{prefix}"
    return f"{value:.3g}"
