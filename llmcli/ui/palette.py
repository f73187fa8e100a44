"""Colours for numbers: two colour maps, and how a value finds its place on a scale.

Both maps grow evenly for the eye and can be told apart by people who see few colours. They are
given by 52 of their 256 colours; between those a line is off by 2 of 255 at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["linear", "sqrt", "log"]
KINDS: tuple[Kind, ...] = ("linear", "sqrt", "log")
DECADES = 4  # of a logarithmic scale: what is less than 1/10000 of its end looks like nothing

# viridis, by Stéfan van der Walt and Nathaniel Smith (public domain): dark is little
_VIRIDIS = (
    "44015446085c471063481769481d6f482475472a7a46307e453781433d844142873f48893d4e8a3a538b"
    "38598c355e8d33638d31688e2e6d8e2c718e2a768e297b8e27808e25848e23898e218e8d20928c1f978b"
    "1e9c891fa18821a58524aa8328ae802eb37c35b7793dbc7446c06f50c46a5ac86465cb5e70cf577cd250"
    "89d54895d840a2da37b0dd2fbddf26cae11fd8e219e5e419f1e51dfde725"
)
# Kenneth Moreland's cool to warm: blue is negative, grey is zero, red is positive
_COOL_WARM = (
    "3b4cc04055c8465ecf4c66d6536edd5977e35f7fe86687ed6c8ff17396f57a9df881a4fb88abfd8fb1fe"
    "96b7ff9dbdffa3c2feaac7fdb1cbfcb7cff9bed2f6c4d5f3cad8efcfdaead5dbe5dadce0dfdbd9e4d9d2"
    "e9d5cbedd2c3f0cdbbf2c9b4f5c4acf6bea4f7b89cf7b194f7aa8cf6a385f59c7df39475f08b6eed8366"
    "e97a5fe57058e16751dc5d4ad65244d0473dca3b37c32e31bb1b2cb40426"
)


def _table(colours: str) -> np.ndarray:
    """All 256 colours of a map, `[256, 3]` uint8."""
    given = np.frombuffer(bytes.fromhex(colours), np.uint8).reshape(-1, 3)
    at, places = np.linspace(0, 255, len(given)), np.arange(256)
    parts = [np.interp(places, at, given[:, part]) for part in range(3)]
    return np.stack(parts, axis=1).round().astype(np.uint8)


VIRIDIS = _table(_VIRIDIS)
DIVERGING = _table(_COOL_WARM)


def rgb(fractions: np.ndarray, *, diverging: bool = False) -> np.ndarray:
    """The colours of numbers 0 … 1: `[...]` → `[..., 3]` uint8.

    What is outside is as the nearer end, NaN as 0: whoever draws knows what is masked.
    `diverging`: 0.5 is the middle, from which two colours go apart.
    """
    table = DIVERGING if diverging else VIRIDIS
    places = np.nan_to_num(np.asarray(fractions, np.float64), nan=0.0, posinf=1.0, neginf=0.0)
    return np.take(table, (places.clip(0, 1) * 255).round().astype(np.intp), axis=0)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From `low` to `high`. `signed`: zero is in the middle, and `low` is -`high`.

    `sqrt` and `log` give more room to small values; `log` ends at 1/10000 of `high`.
    """

    low: float
    high: float
    kind: Kind = "linear"
    signed: bool = False

    @classmethod
    def around(cls, values: Sequence[np.ndarray], kind: Kind = "linear") -> Scale:
        """The signed scale that all finite `values` fit, NaN and infinities left aside."""
        most = 0.0
        for array in values:
            finite = np.abs(array[np.isfinite(array)])
            most = max(most, float(finite.max())) if finite.size else most
        return cls(low=-(most or 1.0), high=most or 1.0, kind=kind, signed=True)

    def fractions(self, values: np.ndarray) -> np.ndarray:
        """Places 0 … 1 on the scale, of the same shape in float64; NaN stays NaN."""
        wide = np.asarray(values, np.float64)
        if self.signed:
            bent = _bent(np.abs(wide) / self.high, self.kind)
            return np.asarray(0.5 + 0.5 * np.sign(wide) * bent)
        return _bent((wide - self.low) / ((self.high - self.low) or 1.0), self.kind)

    def value(self, fraction: float) -> float:
        """The value at a place: `fractions` backwards, where that is one value."""
        if self.signed:
            side = 2 * fraction - 1
            return float(np.copysign(_unbent(abs(side), self.kind) * self.high, side))
        return self.low + _unbent(fraction, self.kind) * (self.high - self.low)


def _bent(parts: np.ndarray, kind: Kind) -> np.ndarray:
    bent: np.ndarray = parts.clip(0, 1)
    if kind == "sqrt":
        bent = np.sqrt(bent)
    elif kind == "log":
        bent = 1 + np.log10(np.maximum(bent, 10.0**-DECADES)) / DECADES
    return bent


def _unbent(part: float, kind: Kind) -> float:
    if kind == "sqrt":
        return part**2
    return 10.0 ** (DECADES * (part - 1)) if kind == "log" and part else part
