"""Which keys a query sees: itself and those before it, the last ones only within a window."""

from __future__ import annotations

import numpy as np


def visible(tokens: int, window: int | None) -> np.ndarray:
    """`[T, T]` of bool, queries down; a `window` of W has the query itself in it."""
    query, key = np.arange(tokens)[:, None], np.arange(tokens)
    seen: np.ndarray = key <= query
    return seen if window is None else seen & (query - key < window)


def visible_count(tokens: int, window: int | None) -> int:
    """How many cells of a matrix are not masked."""
    inside = tokens if window is None else min(tokens, window)
    return inside * (inside + 1) // 2 + (tokens - inside) * inside
