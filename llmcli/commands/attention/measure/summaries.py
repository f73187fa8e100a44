"""What is kept of the rows of a head's matrix: metrics, the largest pairs, cells, whole matrices.

Metrics sum it up row by row (a row that does not count is NaN), and give the kinds of heads.

Axes: H heads, t rows (queries), S keys, T tokens, R rows and C columns of what is drawn. `A[i, j]`
is the weight of key j for query i; logarithms are natural.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli import devices
from llmcli.commands.attention.options import Span
from llmcli.commands.attention.report import Pair
from llmcli.config.attention import Window, seen_keys
from llmcli.inspect.attention import CELLS, Block, Tokens
from llmcli.records.attention import EVEN, LABELS

FEWEST = 4  # rows that count: the mean of fewer says little of a head


def _distance(of: Block) -> Tensor:
    distance_Ht = of.beyond_first[1] + of.first_key_Ht * of.positions_t
    return distance_Ht if of.taken_Ht is None else distance_Ht / of.left_Ht


# each metric of a row, None where these heads have none such, and which rows count (None: all)
ROWS: Mapping[str, tuple[Callable[[Block], Tensor | None], Callable[[Block], Tensor] | None]] = {
    "entropy": (lambda of: of.entropy_Ht, None),
    "normalized_entropy": (
        lambda of: of.entropy_Ht / of.seen_t.to(of.a_HtS.dtype).log(),
        lambda of: of.seen_t > 1,
    ),
    "effective_keys": (lambda of: of.entropy_Ht.exp(), None),
    "max_weight": (lambda of: of.a_HtS.amax(-1), None),
    "current_token": (lambda of: of.back_Ht(0), None),
    "previous_token": (lambda of: of.back_Ht(1), lambda of: of.seen_t > 1),
    # rows that see key 0: under a window the first ones
    "sink": (
        lambda of: of.first_key_Ht,
        lambda of: (of.seen_t > of.positions_t) & (of.positions_t > 0),
    ),
    "sink_rate": (lambda of: of.first_key_Ht, lambda of: of.seen_t > of.positions_t),
    "learned_sink": (lambda of: of.taken_Ht, None),
    # a row of zeros has no shares
    "negative": (
        lambda of: None if of.negative_Ht is None else of.negative_Ht + 0 * of.left_Ht,
        None,
    ),
    # rows that see the key after the last earlier token that equals theirs, and that token
    "induction": (lambda of: of.equal_Ht(after=True), lambda of: of.seen_t >= of.gaps_t),
    "duplicate": (lambda of: of.equal_Ht(after=False), lambda of: of.seen_t > of.gaps_t),
    "distance": (_distance, None),
    # 0 / 0 where all of a row goes to key 0
    "distance_without_sink": (
        lambda of: of.beyond_first[1] / of.beyond_first[0],
        lambda of: of.positions_t > 0,
    ),
    "locality_8": (lambda of: of.last_Ht(8), lambda of: of.seen_t > 8),
    "locality_64": (lambda of: of.last_Ht(64), lambda of: of.seen_t > 64),
}


class RowMeans:
    """The mean of every metric over the rows that count, head by head, as blocks come in."""

    def __init__(self, heads: int) -> None:
        self._sums = torch.zeros(len(ROWS), heads, dtype=torch.float64)
        self._counts = torch.zeros(len(ROWS), heads, dtype=torch.int64)

    def add(self, block: Block) -> None:
        """The rows of `block`."""
        none_Ht, rows = torch.full_like(block.first_key_Ht, math.nan), []
        for values, counts in ROWS.values():
            found_Ht = values(block)
            found_Ht = none_Ht if found_Ht is None else found_Ht
            rows.append(found_Ht if counts is None else found_Ht.where(counts(block), math.nan))
        rows_MHt = torch.stack(rows).cpu().double()
        self._sums[:, block.at] += rows_MHt.nansum(-1)
        self._counts[:, block.at] += (~rows_MHt.isnan()).sum(-1)

    def means(self) -> dict[str, list[float]]:
        """The means of all heads by the metric's name, NaN where no row counted."""
        return dict(zip(ROWS, (self._sums / self._counts).tolist(), strict=True))

    def rows(self) -> dict[str, int]:
        """How many rows counted, of the head that has most of them."""
        most = [max(counts, default=0) for counts in self._counts.tolist()]
        return dict(zip(ROWS, most, strict=True))


def effective_rank(matrix: Tensor) -> Tensor:
    """`exp` of the entropy of the normalized singular values of matrices `[…, d, e]`: `[…]`.

    In float64; 0 of a matrix of zeros.
    """
    sigma_k = torch.linalg.svdvals(matrix.cpu().double())
    total_1 = sigma_k.sum(-1, keepdim=True)
    p_k = torch.where(total_1 > 0, sigma_k / total_1, 0.0)
    rank: Tensor = torch.special.entr(p_k).sum(-1).exp()
    return torch.where(total_1[..., 0] > 0, rank, 0.0)


def labels_of(metrics: Mapping[str, float], undetermined: Container[str] = ()) -> tuple[str, ...]:
    """The kinds of a head with those metrics, but for those that are `undetermined`.

    A metric that is NaN determines none.
    """
    return tuple(
        label.name
        for label in LABELS
        if label.name not in undetermined
        and metrics[label.metric] >= label.threshold  # not where it is NaN
    )


def undetermined_kinds(
    tokens: Tokens, count: int, window: Window | None, *, signed: bool = False
) -> dict[str, str]:
    """The kinds that `count` tokens leave undetermined in a layer with that window, and why.

    Of `signed` weights the entropy determines none: they are no distribution.

    Either fewer than `FEWEST` rows count, or a head that attends evenly to every visible key
    would be called so, too: at the first token of 4, the previous one of a window of 2.
    """
    means = RowMeans(1)
    rows = max(1, CELLS // count)
    for first in range(0, count, rows):
        means.add(_even(tokens, first, min(rows, count - first), window))
    even, counted = means.means(), means.rows()
    found = {}
    for label in LABELS:
        number = counted[label.metric]
        if number < FEWEST:
            rows_count = {0: "no row qualifies", 1: "only 1 row qualifies"}
            found[label.name] = rows_count.get(number, f"only {number} rows qualify")
        elif label.name == EVEN and signed:
            found[label.name] = "weights with signs are no distribution with an entropy"
        elif label.name != EVEN and even[label.metric][0] >= label.threshold:
            found[label.name] = f"equal weights would give {even[label.metric][0]:.2f}"
    return found


def _even(tokens: Tokens, first: int, rows: int, window: Window | None) -> Block:
    """Rows of a head that attends evenly to all the keys that it sees."""
    device = tokens.ids_N.device
    low = max(0, first - seen_keys(first, window))
    at_t1 = torch.arange(first, first + rows, device=device)[:, None]
    keys_S = torch.arange(low, first + rows, device=device)
    seen_t1 = seen_keys(at_t1, window)
    visible_tS = (keys_S <= at_t1) & (keys_S > at_t1 - seen_t1)
    return Block((visible_tS / seen_t1)[None], first, low, seen_t1[:, 0], tokens)


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
                layer=layer,
                head=heads[head],
                kv_head=heads[head] // group,
                query=block.first + row,
                key=block.low + key,
                weight=weight,
                rank_value=rank,
            )
            for head, row, key, weight, rank in zip(*found, strict=True)
        )
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
    """The `part` (queries, keys) of every head's matrix that is drawn, as far as there are tokens.

    One cell is the largest of `pool` × `pool` (`signed`: by magnitude), so that no side is longer
    than `most` cells.
    """

    def __init__(
        self, part: tuple[Span, Span], most: int, heads: int, tokens: int, *, signed: bool = False
    ) -> None:
        self.queries, self.keys = ((min(first, tokens), min(last, tokens)) for first, last in part)
        longest = max(last - first for first, last in (self.queries, self.keys))
        self.pool = max(1, math.ceil(longest / most))
        rows, columns = (
            math.ceil((last - first) / self.pool) for first, last in (self.queries, self.keys)
        )
        # the largest numbers, and with signs the largest of the numbers with the other sign
        self._cells_HRC = {
            sign: torch.full((heads, rows, columns), -math.inf) for sign in (1, -1)[: 1 + signed]
        }

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
        top = (rows.start - self.queries[0]) // self.pool
        begin = (keys.start - self.keys[0]) // self.pool
        columns = slice(begin, begin + part_HtS.shape[2] // self.pool)
        for sign, cells_HRC in self._cells_HRC.items():
            if sign < 0:
                part_HtS = -part_HtS.masked_fill(part_HtS == -math.inf, math.inf)
            pooled_HRC = part_HtS.reshape(shape).amax((2, 4)).to("cpu", torch.float32)
            there_HRC = cells_HRC[heads, top : top + shape[1], columns]
            torch.maximum(there_HRC, pooled_HRC, out=there_HRC)

    def cells(self, head: int) -> np.ndarray:
        """The cells `[R, C]` of one head, NaN where masked."""
        cells_RC, *others = (cells_HRC[head] for cells_HRC in self._cells_HRC.values())
        for other_RC in others:
            cells_RC = torch.where(other_RC > cells_RC, -other_RC, cells_RC)
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
