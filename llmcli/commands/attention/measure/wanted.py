"""What is to be found out of each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmcli.commands.attention.report.heads import PairsBy
from llmcli.commands.attention.report.metrics import RANK
from llmcli.reports.matrix import What

OnMatrix = Callable[[int, np.ndarray], None]
Within = tuple[tuple[int, int], tuple[int, int]]  # queries and keys, each `first` … `last`-1


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The part of each matrix that is kept: queries and keys `first` … `last`-1, None for all.

    Cells are put together, each the largest of a square, until no side is longer than `most`.
    """

    queries: tuple[int, int] | None = None
    keys: tuple[int, int] | None = None
    most: int


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """See `measure_attention`, whose arguments these are. `heads` None: all."""

    heads: tuple[int, ...] | None
    what: What
    metrics: tuple[str, ...]
    matrices: Drawn | None
    pairs: int
    pairs_by: PairsBy
    pairs_within: Within | None
    everything: bool
    weighted: bool
    on_matrix: OnMatrix | None
    block_rows: int | None

    def heads_of(self, count: int) -> list[int]:
        """Which of a layer's `count` heads, in order."""
        asked = range(count) if self.heads is None else sorted(set(self.heads))
        return [head for head in asked if head < count]

    @property
    def whole(self) -> bool:
        """Whether whole matrices are made."""
        return self.on_matrix is not None or RANK in self.metrics
