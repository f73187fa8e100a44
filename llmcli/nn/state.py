"""What a model remembers between calls: an argument, never a part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """Keys `[B, Hk, C, dh]` and values `[B, Hk, C, dv]` of one attention layer, C slots each.

    A token's slot is its position. Zeroed, since a masked slot still enters the product with
    the values as 0 · v, and 0 · NaN is NaN.
    """

    def __init__(self, k_BKCd: Tensor, v_BKCe: Tensor) -> None:
        self.k = k_BKCd
        self.v = v_BKCe

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, int, int],
        key_size: int,
        value_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Self:
        """Empty slots for `shape` = (batch, kv heads, capacity)."""
        return cls(
            torch.zeros(*shape, key_size, device=device, dtype=dtype),
            torch.zeros(*shape, value_size, device=device, dtype=dtype),
        )

    def grow(self, capacity: int) -> None:
        """More slots, what is there kept."""
        more = (0, 0, 0, capacity - self.k.shape[2])  # zeros behind the last slot
        self.k, self.v = F.pad(self.k, more), F.pad(self.v, more)

    def select(self, rows: Tensor) -> KVCache:
        """A copy with those rows of the batch, in that order; a row may be taken repeatedly."""
        return KVCache(self.k.index_select(0, rows), self.v.index_select(0, rows))


class State:
    """One cache per layer, and how many tokens each sequence of the batch has so far.

    `lengths` is a list on the host: the caller knows it without asking the device.
    """

    def __init__(self, layers: Sequence[KVCache], lengths: list[int], capacity: int) -> None:
        self.layers = tuple(layers)
        self.lengths = lengths
        self.capacity = capacity

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches together."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)

    def grow(self, capacity: int) -> None:
        """At least `capacity` slots per sequence; does nothing where they are there."""
        if capacity > self.capacity:
            for layer in self.layers:
                layer.grow(capacity)
            self.capacity = capacity

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets every sequence's tokens from `lengths[b]` on: an undo."""
        for now, wanted in zip(self.lengths, lengths, strict=True):
            if not 0 <= wanted <= now:
                raise ValueError(f"cannot truncate {now} tokens to {wanted}")
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> State:
        """A new state with copies of those sequences: to fork samples or drop finished ones."""
        index = torch.tensor(rows, dtype=torch.long)
        layers = [layer.select(index.to(layer.k.device)) for layer in self.layers]
        return State(layers, [self.lengths[row] for row in rows], self.capacity)
