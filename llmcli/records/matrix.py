"""A displayed part of one attention matrix. Letters: H heads, T queries, S keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

What = Literal["pattern", "scores"]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A part of one head's matrix: queries and keys `first` … `last`-1, NaN where masked.

    `values` is `[rows, columns]` float32. Each value is the maximum of `pool` × `pool` cells (1:
    not pooled); in a signed map the one with the largest magnitude.
    """

    layer: int
    head: int
    kv_head: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    pool: int
    values: np.ndarray
    signed: bool = False
