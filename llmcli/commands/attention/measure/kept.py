"""What is kept of the rows that come in: the largest pairs, parts of matrices, and whole ones.

Axes: H heads, t rows, S keys, R rows and C columns of what is kept.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli import devices
from llmcli.commands.attention.options import Span
from llmcli.commands.attention.report import Pair
from llmcli.inspect.attention.block import Block


class TopPairs:
    """The `count` largest pairs of all layers together, of `part`: their queries and keys.

    A query's own token is no key, nor is the first one or one with the id `bos`: such weights are
    large in every head and say little.
    """

    def __init__(self, count: int, part: tuple[Span, Span], bos: int | None) -> None:
        self._count, self._part, self._bos = count, part, bos
        self.pairs: list[Pair] = []

    def add(
        self, block: Block, ranks_HtS: Tensor, layer: int, heads: list[int], group: int
    ) -> None:
        """Adds the pairs of a block, ranked by `ranks_HtS`; `heads` are its head numbers."""
        if not self._count:
            return
        ranks_HtS = ranks_HtS.nan_to_num(0.0).masked_fill(self._ignored(block), 0.0)
        best, flat = ranks_HtS.flatten().topk(min(self._count, ranks_HtS.numel()))
        at = torch.unravel_index(flat[best > 0], ranks_HtS.shape)
        found = (one.tolist() for one in (*at, block.a_HtS[at], best[best > 0]))
        pairs = (
            Pair(
                layer=layer, head=heads[head], kv_head=heads[head] // group,
                query=block.first + row, key=block.low + key, weight=weight, rank_value=rank,
            )
            for head, row, key, weight, rank in zip(*found, strict=True)
        )  # fmt: skip
        self.pairs = heapq.nlargest(self._count, [*self.pairs, *pairs], key=_order)

    def _ignored(self, block: Block) -> Tensor:
        """Which cells do not count, `[t, S]`."""
        keys_S, positions_t1 = block.keys_S, block.positions_t[:, None]
        outside_tS = torch.zeros_like(keys_S > positions_t1)
        for span, at in zip(self._part, (positions_t1, keys_S), strict=True):
            outside_tS |= (at < span[0]) | (at >= span[1])
        ids_S = block.tokens.ids_N[block.low : block.low + len(keys_S)]
        left_out_S = keys_S == 0
        if self._bos is not None:
            left_out_S |= ids_S == self._bos
        return outside_tS | left_out_S | (keys_S == positions_t1)


def _order(pair: Pair) -> tuple[float, ...]:
    """Larger ones first, and the first of equal ones."""
    return pair.rank_value, -pair.layer, -pair.head, -pair.query, -pair.key


class Pooled:
    """The `part` (queries, keys) of every head's matrix that is drawn, within so many tokens.

    One cell is the largest of `pool` × `pool` (`signed`: by magnitude), so that no side is longer
    than `most` cells.
    """

    def __init__(
        self, part: tuple[Span, Span], most: int, heads: int, tokens: int, *, signed: bool = False
    ) -> None:
        self.queries, self.keys = (
            (min(first, tokens), min(last, tokens)) for first, last in part
        )
        longest = max(last - first for first, last in (self.queries, self.keys))
        self.pool = max(1, math.ceil(longest / most))
        rows, columns = (
            math.ceil((last - first) / self.pool) for first, last in (self.queries, self.keys)
        )
        self._most_HRC = torch.full((heads, rows, columns), -math.inf)
        self._least_HRC = -self._most_HRC if signed else None

    def add(self, values_HtS: Tensor, heads: slice, first: int, low: int) -> None:
        """A block, -∞ where masked: rows from `first`, keys from `low` on."""
        rows = slice(max(first, self.queries[0]), min(first + values_HtS.shape[1], self.queries[1]))
        keys = slice(max(low, self.keys[0]), min(low + values_HtS.shape[2], self.keys[1]))
        if rows.start >= rows.stop or keys.start >= keys.stop:
            return
        part_HtS = values_HtS[
            :, rows.start - first : rows.stop - first, keys.start - low : keys.stop - low
        ]
        above, below = _padding(rows, self.queries[0], self.pool)
        left, right = _padding(keys, self.keys[0], self.pool)
        part_HtS = F.pad(part_HtS, (left, right, above, below), value=-math.inf)
        shape = (len(part_HtS), part_HtS.shape[1] // self.pool, self.pool, -1, self.pool)
        top, begin = ((of.start - span[0]) // self.pool
                      for of, span in ((rows, self.queries), (keys, self.keys)))  # fmt: skip

        def there(cells_HRC: Tensor) -> Tensor:
            columns = slice(begin, begin + part_HtS.shape[2] // self.pool)
            return cells_HRC[heads, top : top + shape[1], columns]

        pooled_HRC = part_HtS.reshape(shape).amax((2, 4)).to("cpu", torch.float32)
        torch.maximum(there(self._most_HRC), pooled_HRC, out=there(self._most_HRC))
        if self._least_HRC is not None:
            part_HtS = part_HtS.masked_fill(part_HtS == -math.inf, math.inf)
            pooled_HRC = part_HtS.reshape(shape).amin((2, 4)).to("cpu", torch.float32)
            torch.minimum(there(self._least_HRC), pooled_HRC, out=there(self._least_HRC))

    def cells(self, head: int) -> np.ndarray:
        """The cells `[R, C]` of one head, NaN where masked."""
        cells_RC = self._most_HRC[head]
        if self._least_HRC is not None:
            least_RC = self._least_HRC[head]
            # both are infinite where all is masked
            cells_RC = torch.where(-least_RC > cells_RC, least_RC, cells_RC)
        values: np.ndarray = torch.where(cells_RC == -math.inf, math.nan, cells_RC).numpy()
        return values


class Whole:
    """Every number of the matrices of `heads` heads over `tokens` tokens, `empty` where masked.

    Raises OutOfMemory where they do not fit.
    """

    def __init__(self, heads: int, tokens: int, empty: float, dtype: torch.dtype) -> None:
        cpu = torch.device("cpu")
        devices.require_memory(
            heads * tokens**2 * dtype.itemsize,
            cpu,
            f"whole matrices of {heads} heads and {tokens} tokens",
            "choose fewer heads, or a shorter prompt",
        )
        self.values_HTS = torch.full((heads, tokens, tokens), empty, dtype=dtype)

    def add(self, values_HtS: Tensor, heads: slice, first: int, low: int) -> None:
        """A block: rows from `first`, keys from `low` on."""
        rows, keys = values_HtS.shape[1:]
        self.values_HTS[heads, first : first + rows, low : low + keys] = values_HtS.to("cpu")


def _padding(part: slice, origin: int, pool: int) -> tuple[int, int]:
    """What has to be added before and after, for cells of `pool` that begin at `origin`."""
    before = (part.start - origin) % pool
    return before, -(before + part.stop - part.start) % pool
