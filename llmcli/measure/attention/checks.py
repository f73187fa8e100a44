"""What is proven of every row while it is there: that it is a distribution over the right keys,
and that with the values it gives what the fused kernel computed.

Axes: H heads, t rows, S keys of a block, e size of a head's value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llmcli.errors import NotFinite
from llmcli.measure.attention.block import Block
from llmcli.reports.checks import ViewCheck

# How many roundings (eps) the sum of a row of up to 1024 keys may be off, and longer ones more by
# the root of their length: softmax adds up as many. Measured: 6 with 400 keys, 34 with 32768.
SUM_ROUNDINGS = 32
SUM_KEYS = 1024

# How many roundings of its size a mixed value may be off. Measured, the worst of all rows of every
# family's small models, float16 to float64: 1.6.
VALUE_ROUNDINGS = 8


class Worst:
    """The largest of many numbers, and where it was."""

    def __init__(self) -> None:
        self.value = 0.0
        self.where = ""

    def see(self, values_Ht: Tensor, layer: int, heads: Sequence[int], first: int) -> None:
        """Numbers ≥ 0 of the rows from `first` on. Raises NotFinite for NaN and infinity."""
        most, at = values_Ht.flatten().max(0)
        head, row = divmod(int(at), values_Ht.shape[1])
        where = f"blocks.{layer}.attn.pattern[{heads[head]},{first + row}]"
        if not math.isfinite(float(most)):
            raise NotFinite(
                f"`{where}` does not follow from finite numbers",
                hint="`llmcli dump --name 'blocks.*'` names the first one that is not",
            )
        if float(most) > self.value:
            self.value, self.where = float(most), where


class Proof:
    """The checks that every row of every head goes through."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._eps = torch.finfo(dtype).eps
        self._wide_eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        self._longest = SUM_KEYS
        self._sums = Worst()
        self._masks = Worst()
        self._values = Worst()

    def see(self, block: Block, scores_HtS: Tensor, layer: int, heads: Sequence[int]) -> None:
        """That the rows add up to 1, and which keys have a weight at all."""
        self._longest = max(self._longest, block.a_HtS.shape[2])
        off_Ht = (block.a_HtS.sum(-1) - 1).abs()
        self._sums.see(off_Ht, layer, heads, block.first)
        self._masks.see(wrong_cells(block, scores_HtS), layer, heads, block.first)

    def compare(
        self,
        block: Block,
        layer: int,
        heads: Sequence[int],
        *,
        v_KSe: Tensor,
        k_KSd: Tensor,
        scaled_q_Htd: Tensor,
        z_Hte: Tensor,
    ) -> None:
        """That the pattern times the values is what the kernel computed as `z`.

        Counted in roundings: of the result in the model's own dtype, and of the scores, which the
        kernel never writes, in at least float32. A score is as wrong as ‖q‖ ‖k‖ is large.
        """
        size_HtS = block.a_HtS.shape
        a_KgS = block.a_HtS.reshape(len(v_KSe), -1, size_HtS[2])
        v_S, k_S = v_KSe.norm(dim=-1), k_KSd.norm(dim=-1)
        sizes_Kg3 = a_KgS @ torch.stack((v_S, k_S, k_S * v_S), -1)
        value_Ht, key_Ht, both_Ht = sizes_Kg3.reshape(*size_HtS[:2], 3).unbind(-1)
        mixed_Hte = (a_KgS @ v_KSe).reshape(*size_HtS[:2], -1)
        scores_off_Ht = scaled_q_Htd.norm(dim=-1) * (both_Ht + key_Ht * value_Ht)
        rounding_Ht = self._eps * value_Ht + self._wide_eps * scores_off_Ht
        apart_Ht = (mixed_Hte - z_Hte).abs().amax(-1)
        share_Ht = torch.where(apart_Ht == 0, 0.0, apart_Ht / rounding_Ht)
        self._values.see(share_Ht, layer, heads, block.first)

    def checks(self) -> tuple[ViewCheck, ...]:
        """Three, over all that was seen."""
        return (
            ViewCheck(
                name="row_sums",
                words="the weights of every query add up to 1",
                value=self._sums.value,
                tolerance=SUM_ROUNDINGS * self._wide_eps * math.sqrt(self._longest / SUM_KEYS),
                where=self._sums.where,
            ),
            ViewCheck(
                name="masks",
                words="every query sees the keys that it may, and what is masked is 0",
                value=self._masks.value,
                tolerance=0.0,
                where=self._masks.where,
            ),
            ViewCheck(
                name="values",
                words="pattern · values is the layer's own z, but for roundings (counted)",
                value=self._values.value,
                tolerance=VALUE_ROUNDINGS,
                where=self._values.where,
            ),
        )


def wrong_cells(block: Block, scores_HtS: Tensor) -> Tensor:
    """How many cells of each row are masked and should not be, or the other way: `[H, t]`.

    A masked cell has the weight 0 and the score -∞. Which are is counted anew here: row i sees
    its last `seen_t` keys. Keys that all rows or none see are looked at as a whole.
    """
    last_t = block.positions_t
    begin_t = last_t - block.seen_t + 1
    end = int(last_t[0]) - block.low + 1  # all rows see the keys from `start` to here
    start = max(0, min(int(begin_t[-1]) - block.low, end))
    wrong_Ht = (scores_HtS[:, :, start:end] == -math.inf).any(-1).long()
    for band in (slice(0, start), slice(end, None)):
        keys_S = block.keys_S[band]
        seen_tS = (keys_S >= begin_t[:, None]) & (keys_S <= last_t[:, None])
        masked_HtS = scores_HtS[:, :, band] == -math.inf
        leaks_HtS = (block.a_HtS[:, :, band] != 0) & ~seen_tS
        wrong_Ht = wrong_Ht + ((masked_HtS == seen_tS) | leaks_HtS).sum(-1)
    return wrong_Ht


def cache_check(emitted_KSd: Tensor, cached_KSd: Tensor, name: str) -> ViewCheck:
    """Whether the cache called `name` holds what the layer emitted, bit for bit."""
    apart_KS = (emitted_KSd - cached_KSd).abs().amax(-1)
    head, position = divmod(int(apart_KS.argmax()), apart_KS.shape[1])
    apart = float(apart_KS.max())
    return ViewCheck(
        name="cache",
        words="the cache holds the keys and values that were computed",
        value=apart,
        tolerance=0.0,
        where=f"{name}[{head},{position}]" if apart else "",
    )
