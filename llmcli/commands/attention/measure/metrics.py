"""What a head's matrix is summed up by, row by row, and the kinds of heads that follow from it.

A row that does not count is NaN.

Axes: H heads, t rows, S keys. `A[i, j]` is the weight of key j for query i; logarithms are natural.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from llmcli.inspect.attention import CELLS, Block, Tokens
from llmcli.records.head_metrics import EVEN, LABELS

FEWEST = 4  # rows that count: the mean of fewer says little of a head


def _normalized(block: Block) -> Tensor:
    most_t = block.seen_t.to(block.a_HtS.dtype).log()
    return block.entropy_Ht / most_t.masked_fill(block.seen_t < 2, math.nan)


def _without_sink(block: Block) -> Tensor:
    mass_Ht, moment_Ht = block.beyond_first
    # 0 / 0 where all of a row goes to key 0
    return (moment_Ht / mass_Ht).masked_fill(block.positions_t < 1, math.nan)


def _distance(block: Block) -> Tensor:
    distance_Ht = block.beyond_first[1] + block.first_key_Ht * block.positions_t
    return distance_Ht if block.taken_Ht is None else distance_Ht / block.left_Ht


def _negative(block: Block) -> Tensor:
    # a row of zeros has no shares
    return _nan(block) if block.negative_Ht is None else block.negative_Ht + 0 * block.left_Ht


def _nan(block: Block) -> Tensor:
    return torch.full_like(block.first_key_Ht, math.nan)


def _beyond(keys: int, block: Block, values_Ht: Tensor) -> Tensor:
    """Only rows that see more keys than so many."""
    return values_Ht.masked_fill(block.seen_t <= keys, math.nan)


def _first_key(block: Block) -> Tensor:
    """Only rows that see it: under a window the first ones."""
    return block.first_key_Ht.masked_fill(block.seen_t <= block.positions_t, math.nan)


def _after_equal(block: Block) -> Tensor:
    """Only rows that see the key after the last earlier token that equals theirs."""
    return block.equal_Ht(after=True).masked_fill(block.seen_t < block.gaps_t, math.nan)


def _equal(block: Block) -> Tensor:
    """Only rows that see an earlier token that equals theirs."""
    return block.equal_Ht(after=False).masked_fill(block.seen_t <= block.gaps_t, math.nan)


ROWS: Mapping[str, Callable[[Block], Tensor]] = {
    "entropy": lambda block: block.entropy_Ht,
    "normalized_entropy": _normalized,
    "effective_keys": lambda block: block.entropy_Ht.exp(),
    "max_weight": lambda block: block.a_HtS.amax(-1),
    "current_token": lambda block: block.back_Ht(0),
    "previous_token": lambda block: _beyond(1, block, block.back_Ht(1)),
    "sink": lambda block: _first_key(block).masked_fill(block.positions_t < 1, math.nan),
    "sink_rate": _first_key,
    "learned_sink": lambda block: _nan(block) if block.taken_Ht is None else block.taken_Ht,
    "negative": _negative,
    "induction": _after_equal,
    "duplicate": _equal,
    "distance": _distance,
    "distance_without_sink": _without_sink,
    "locality_8": lambda block: _beyond(8, block, block.last_Ht(8)),
    "locality_64": lambda block: _beyond(64, block, block.last_Ht(64)),
}


class RowMeans:
    """The mean of every metric over the rows that count, head by head, as blocks come in."""

    def __init__(self, heads: int) -> None:
        self._sums = torch.zeros(len(ROWS), heads, dtype=torch.float64)
        self._counts = torch.zeros(len(ROWS), heads, dtype=torch.int64)

    def add(self, block: Block, heads: slice) -> None:
        """The rows of `block`, whose heads stand at `heads` among ours."""
        rows_MHt = torch.stack([row(block) for row in ROWS.values()]).cpu().double()
        self._sums[:, heads] += rows_MHt.nansum(-1)
        self._counts[:, heads] += (~rows_MHt.isnan()).sum(-1)

    def means(self) -> dict[str, list[float]]:
        """Of every metric by name those of the heads, NaN where no row counted."""
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
    tokens: Tokens, count: int, window: int | None, *, signed: bool = False
) -> dict[str, str]:
    """The kinds that `count` tokens leave undetermined in a layer with that window, and why.

    Of `signed` weights the entropy determines none: they are no distribution.

    Either fewer than `FEWEST` rows count, or a head that attends evenly to every visible key
    would be called so, too: at the first token of 4, the previous one of a window of 2.
    """
    means = RowMeans(1)
    rows = max(1, CELLS // count)
    for first in range(0, count, rows):
        means.add(_even(tokens, first, min(rows, count - first), window), slice(0, 1))
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


def _even(tokens: Tokens, first: int, rows: int, window: int | None) -> Block:
    """Rows of a head that attends evenly to all the keys that it sees."""
    device = tokens.ids_N.device
    low = 0 if window is None else max(0, first - window)
    at_t1 = torch.arange(first, first + rows, device=device)[:, None]
    keys_S = torch.arange(low, first + rows, device=device)
    seen_t1 = (at_t1 + 1).clamp_max(first + rows if window is None else window)
    visible_tS = (keys_S <= at_t1) & (keys_S > at_t1 - seen_t1)
    return Block((visible_tS / seen_t1)[None], first, low, seen_t1[:, 0], tokens)
