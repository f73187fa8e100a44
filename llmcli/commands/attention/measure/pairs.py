"""The pairs of tokens with the largest weights, kept while the rows come in.

Axes: H heads, t rows, S keys.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from llmcli.commands.attention.measure.wanted import Within
from llmcli.commands.attention.report.heads import Pair
from llmcli.observe.attention.block import Block


class TopPairs:
    """At most `count` pairs of all layers together, the largest first.

    Unless `everything` counts, a query's own token is no key, nor is the first one or one with
    the id `bos`: such weights are large in every head and say little. `within`: only pairs of
    these queries and keys.
    """

    def __init__(
        self, count: int, *, everything: bool, bos: int | None, within: Within | None = None
    ) -> None:
        self.count = count
        self._within = within
        self._everything = everything
        self._bos = bos
        self._found: list[tuple[float, tuple[int, int, int, int], Pair]] = []

    def add(
        self, block: Block, ranks_HtS: Tensor, layer: int, heads: list[int], group: int
    ) -> None:
        """Those of a block, ranked by `ranks_HtS`; `heads` are the numbers of its heads."""
        if not self.count:
            return
        ranks_HtS = ranks_HtS.nan_to_num(0.0).masked_fill(self._ignored(block), 0.0)
        best, at = ranks_HtS.flatten().topk(min(self.count, ranks_HtS.numel()))
        kept = best > 0
        rows, keys = ranks_HtS.shape[1:]
        for rank, flat in zip(best[kept].tolist(), at[kept].tolist(), strict=True):
            head, row, key = flat // (rows * keys), flat // keys % rows, flat % keys
            number, query, seen = heads[head], block.first + row, block.low + key
            pair = Pair(
                layer=layer,
                head=number,
                kv_head=number // group,
                query=query,
                key=seen,
                weight=float(block.a_HtS[head, row, key]),
                rank_value=rank,
            )
            order = (-layer, -number, -query, -seen)  # of equal ones the first
            self._found.append((rank, order, pair))
        self._found = heapq.nlargest(self.count, self._found, key=lambda found: found[:2])

    def _ignored(self, block: Block) -> Tensor:
        """Which cells do not count, `[t, S]`."""
        keys_S, positions_t1 = block.keys_S, block.positions_t[:, None]
        outside_tS = torch.zeros_like(keys_S > positions_t1)
        if self._within is not None:
            (first, last), (low, high) = self._within
            outside_tS |= (positions_t1 < first) | (positions_t1 >= last)
            outside_tS |= (keys_S < low) | (keys_S >= high)
        if self._everything:
            return outside_tS
        ids_S = block.tokens.ids_N[block.low : block.low + len(keys_S)]
        left_out_S = keys_S == 0
        if self._bos is not None:
            left_out_S |= ids_S == self._bos
        return outside_tS | left_out_S | (keys_S == positions_t1)

    def pairs(self) -> tuple[Pair, ...]:
        """The largest first."""
        return tuple(pair for _, _, pair in self._found)
