"""Normalizations of one row."""

from __future__ import annotations

import math

from llmcli.ops.twins.vectors import Vector


def rms_norm(x: Vector, w: Vector, eps: float) -> list[float]:
    """Every number divided by the root of the mean square, times its weight."""
    rms = math.sqrt(math.fsum(a * a for a in x) / len(x) + eps)
    return [a / rms * b for a, b in zip(x, w, strict=True)]


def layer_norm(x: Vector, w: Vector, b: Vector, eps: float) -> list[float]:
    """`scale · (activation - mean) / √(variance + ε) + shift`."""
    mean = math.fsum(x) / len(x)
    variance = math.fsum((a - mean) ** 2 for a in x) / len(x)
    scale = math.sqrt(variance + eps)
    return [(a - mean) / scale * s + shift for a, s, shift in zip(x, w, b, strict=True)]


def l2_norm(x: Vector, eps: float) -> list[float]:
    """Every number divided by the length of the row, `√(Σ x² + ε)`: ε is inside the root."""
    length = math.sqrt(math.fsum(a * a for a in x) + eps)
    return [a / length for a in x]
