"""The tokens that sequences have read, kept on the device: to know one on the host is to wait.

Axes: B sequences, T tokens of one call, C slots of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor


class Ids:
    """Ids `[B, C]` of B sequences, which know their lengths themselves."""

    def __init__(self, ids_BC: Tensor) -> None:
        self._ids_BC = ids_BC

    @classmethod
    def none(cls, batch: int, capacity: int, device: torch.device) -> Self:
        """Room for so many."""
        return cls(torch.zeros(batch, capacity, dtype=torch.long, device=device))

    def rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """Those of every sequence, on the host."""
        rows = self._ids_BC.tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def write(self, ids_BT: Tensor, starts: Sequence[int]) -> None:
        """From `starts[b]` on. Padding lands behind the last token, where the next one goes."""
        tokens = ids_BT.shape[1]
        if len(set(starts)) == 1:
            self._ids_BC[:, starts[0] : starts[0] + tokens] = ids_BT
        else:
            at_B1 = torch.tensor(starts, device=ids_BT.device).unsqueeze(1)
            at_BT = at_B1 + torch.arange(tokens, device=ids_BT.device)
            self._ids_BC.scatter_(1, at_BT, ids_BT)

    def write_last(self, ids_B1: Tensor, lengths_B: Tensor) -> None:
        """The last token of sequences of these lengths, which the host does not know."""
        self._ids_BC.scatter_(1, (lengths_B - 1).unsqueeze(1), ids_B1)

    def select(self, rows: Tensor) -> Self:
        """A copy with those sequences, in that order."""
        return type(self)(self._ids_BC.index_select(0, rows))

    def clone(self) -> Self:
        """A copy."""
        return type(self)(self._ids_BC.clone())

    def grow(self, capacity: int) -> None:
        """At least so many slots."""
        self._ids_BC = F.pad(self._ids_BC, (0, max(0, capacity - self._ids_BC.shape[1])))
