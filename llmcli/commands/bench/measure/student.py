"""Student's t: how wide an interval has to be when the spread itself is an estimate."""

from __future__ import annotations

import math

_TINY = 1e-300  # keeps the continued fraction from dividing by 0


def two_sided(confidence: float, freedom: float) -> float:
    """The t for which |T| ≤ t with that probability (0 … 1), at `freedom` > 0 degrees of freedom.

    By halving: the probability outside is I_x(freedom / 2, 1 / 2) with x = ν / (ν + t²).
    """
    outside = 1.0 - confidence
    low, high = 0.0, 2.0
    while _outside(high, freedom) > outside:
        high *= 2.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if _outside(middle, freedom) > outside else (low, middle)
    return (low + high) / 2.0


def _outside(t: float, freedom: float) -> float:
    return _beta(freedom / (freedom + t * t), freedom / 2.0, 0.5)


def _beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):  # where the fraction converges slowly
        return 1.0 - _beta(1.0 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front += a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """Its continued fraction (Abramowitz & Stegun 26.5.8), evaluated as Lentz does."""
    c, d = 1.0, 1.0 / _away(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _away(1.0 + term * d)
            c = _away(1.0 + term / c)
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def _away(number: float) -> float:
    return number if abs(number) > _TINY else _TINY
