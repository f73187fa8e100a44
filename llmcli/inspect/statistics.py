"""Mean, standard deviation, range and norm of numbers that come in parts, and such parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from llmcli.devices import float64_device

_AT_ONCE = 1 << 17  # numbers processed together: 1 MiB of float64, which a cache holds
_ON_GPU = 1 << 22  # there a call costs more than its work
AT_ONCE = 1 << 22  # numbers of a part, 32 MiB of float64


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Parts in C order, small enough to be copied one by one: rows of it, of a `[H, T, d]` head
    by head; a view in another order is not copied whole."""
    if tensor.ndim > 2:
        for one in tensor:
            yield from parts(one)
    elif tensor.ndim == 2:
        rows = max(1, AT_ONCE // max(1, tensor.shape[1]))
        yield from (tensor[first : first + rows] for first in range(0, len(tensor), rows))
    else:
        yield tensor


class _Faults(Protocol):
    """How many numbers of a tensor are NaN and infinite, and the index of the first of them."""

    @property
    def nan(self) -> int: ...
    @property
    def inf(self) -> int: ...
    @property
    def first_bad(self) -> tuple[int, ...] | None: ...


def not_finite(name: str, found: _Faults | None) -> str:
    """The first number of `name` that is not finite, and what it is; empty where all are finite."""
    if found is None or found.first_bad is None:
        return ""
    kind = "not a number" if not found.inf else "infinite" if not found.nan else "not finite"
    return f"`{name}[{','.join(map(str, found.first_bad))}]` is {kind}"


class Summary(TypedDict):
    """What reports have of a tensor: NaN without a finite number; `std` is √(Σ (x − mean)² / n).

    `nan` and `inf` count what is not finite, and `first_bad` is the index of the first of these.
    """

    mean: float
    std: float
    min: float
    max: float
    nan: int
    inf: int
    first_bad: tuple[int, ...] | None


class Statistics:
    """Of all numbers seen so far, in float64: of the finite ones, and how many are not.

    `masks`: −∞ stands for a key that may not be seen, and is counted apart. `negative` of the
    `infinite` are −∞. `seen`: how many numbers there were, finite or not.
    """

    def __init__(self, *, masks: bool = False) -> None:
        self._masks = masks
        self.seen = 0
        self._finite = 0
        self._mean = 0.0
        self._apart = 0.0  # Σ (x − mean)²
        self._squares = 0.0
        self._low, self._high = math.inf, -math.inf
        self.zeros = 0
        self.masked = 0
        self.nan = 0
        self.infinite = 0
        self.negative = 0
        self.first_bad: int | None = None  # counted in the order in which they came

    def add(self, part: Tensor) -> None:
        """Adds numbers, on any device; they are read a little at a time."""
        device = float64_device(part.device)
        flat = part.reshape(-1)
        step = _AT_ONCE if flat.device.type == "cpu" else _ON_GPU
        for first in range(0, len(flat), step):
            self._add(flat[first : first + step].to(device, torch.float64))

    def _add(self, x: Tensor) -> None:
        low, high = (float(end) for end in x.aminmax())  # NaN where there is one
        if not (math.isfinite(low) and math.isfinite(high)):
            self._count_bad(x)
            x = x[x.isfinite()]
            low, high = (float(end) for end in x.aminmax()) if len(x) else (math.inf, -math.inf)
        else:
            self.seen += len(x)
        if len(x):
            self._merge(x)
            self._low, self._high = min(self._low, low), max(self._high, high)

    def _merge(self, x: Tensor) -> None:
        """Two parts are put together as Chan, Golub & LeVeque (1979) do."""
        mean, count = float(x.mean()), self._finite + len(x)
        off = mean - self._mean
        self.zeros += len(x) - int(x.count_nonzero())
        self._squares += float(x.dot(x))
        x = x - mean
        self._apart += float(x.dot(x)) + off * off * self._finite * len(x) / count
        self._mean += off * len(x) / count
        self._finite = count

    def _count_bad(self, x: Tensor) -> None:
        bad = ~x.isfinite()
        below = x == -math.inf
        if self._masks:
            self.masked += int(below.sum())
            bad &= ~below
        else:
            self.negative += int(below.sum())
        nan = int(x.isnan().sum())
        self.nan += nan
        self.infinite += int(bad.sum()) - nan
        if self.first_bad is None and bad.any():
            self.first_bad = self.seen + int(bad.nonzero()[0])
        self.seen += len(x)

    def summary(self, shape: tuple[int, ...]) -> Summary:
        """Of a tensor of that `shape`, whose numbers came in C order."""
        mean, std, low, high = [math.nan] * 4
        if self._finite:
            mean, std = self._mean, math.sqrt(self._apart / self._finite)
            low, high = self._low, self._high
        bad, nan, inf = self.first_bad, self.nan, self.infinite
        index = None if bad is None else tuple(int(i) for i in np.unravel_index(bad, shape))
        return Summary(mean=mean, std=std, min=low, max=high, nan=nan, inf=inf, first_bad=index)

    @property
    def norm(self) -> float:
        """√(Σ x²), NaN without a finite number."""
        return math.sqrt(self._squares) if self._finite else math.nan
