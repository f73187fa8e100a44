"""Mean, standard deviation, range and norm of numbers that come in parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Statistics:
    """Of all numbers seen so far, in float64: of the finite ones, and how many are not.

    `masks`: −∞ stands for a key that may not be seen, and is counted apart.
    """

    def __init__(self, *, masks: bool = False) -> None:
        self._masks = masks
        self._seen = 0
        self._finite = 0
        self._mean = 0.0
        self._apart = 0.0  # Σ (x − mean)²
        self._squares = 0.0
        self._low, self._high = math.inf, -math.inf
        self.masked = 0
        self.nan = 0
        self.infinite = 0
        self.first_bad: int | None = None  # counted in the order in which they came

    def add(self, part: Tensor) -> None:
        """More numbers. Two parts are put together as Chan, Golub & LeVeque (1979) do."""
        x = part.to("cpu", torch.float64).flatten()
        self._count_bad(x)
        x = x[x.isfinite()]
        if len(x):
            mean, count = float(x.mean()), self._finite + len(x)
            off = mean - self._mean
            self._apart += float((x - mean).square().sum())
            self._apart += off * off * self._finite * len(x) / count
            self._mean += off * len(x) / count
            self._finite = count
            self._squares += float(x.square().sum())
            self._low = min(self._low, float(x.min()))
            self._high = max(self._high, float(x.max()))

    def _count_bad(self, x: Tensor) -> None:
        bad = ~x.isfinite()
        if self._masks:
            masked = x == -math.inf
            self.masked += int(masked.sum())
            bad &= ~masked
        nan = int(x.isnan().sum())
        self.nan += nan
        self.infinite += int(bad.sum()) - nan
        if self.first_bad is None and bad.any():
            self.first_bad = self._seen + int(bad.nonzero()[0])
        self._seen += len(x)

    @property
    def mean(self) -> float:
        """NaN without a number, as the next four."""
        return self._mean if self._finite else math.nan

    @property
    def std(self) -> float:
        """√(Σ (x − mean)² / n)."""
        return math.sqrt(self._apart / self._finite) if self._finite else math.nan

    @property
    def low(self) -> float:
        """The smallest."""
        return self._low if self._finite else math.nan

    @property
    def high(self) -> float:
        """The largest."""
        return self._high if self._finite else math.nan

    @property
    def norm(self) -> float:
        """√(Σ x²)."""
        return math.sqrt(self._squares) if self._finite else math.nan
