"""Checks of every row as it is computed: it is a distribution over the right keys, and its product
with the values is what the fused kernel computed.

Axes: H heads, t rows, S keys of a block, e size of a head's value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llmcli.errors import NotFinite
from llmcli.inspect.attention.block import Block
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.recurrence import ROUNDINGS
from llmcli.records.document import ViewCheck

# How many roundings (eps) the sum of a row of up to 1024 keys may be off, and longer ones more by
# the root of their length: softmax adds up as many. Measured: 6 with 400 keys, 34 with 32768.
SUM_ROUNDINGS = 32
SUM_KEYS = 1024

# How many roundings of float32 and float64 a mixed value may be off: of its size and of the scores.
# Measured, the worst of all rows of every family's small models: 1.6. Beyond 64 keys they grow with
# the root of their number, for values of equal tokens round alike: 8.9 with 300 keys, 20 with 2000.
VALUE_ROUNDINGS = 8
VALUE_KEYS = 64
# … and how many of 16 bits, where weights and results are rounded to these: half an eps each.
# Measured on a CPU: 0.37. What a GPU needs is not measured.
NARROW_ROUNDINGS, NARROW_ROUNDINGS_GPU = 1.0, 4.0


class AttentionChecks:
    """The checks that every row of every head goes through."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._eps = torch.finfo(dtype).eps
        self._wide_eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        roundings = NARROW_ROUNDINGS if device.type == "cpu" else NARROW_ROUNDINGS_GPU
        self._narrow_off = roundings * self._eps if dtype.itemsize == 2 else 0.0
        self._longest, self._sinks = SUM_KEYS, False
        self._worst: dict[str, tuple[float, str]] = {}  # by the check, the largest, and its place

    def _add(
        self, check: str, values_Ht: Tensor, of: LayerMap, heads: Sequence[int], first: int
    ) -> None:
        """Numbers ≥ 0 of rows from `first` on. Raises NotFinite for NaN and infinity."""
        largest, at = values_Ht.flatten().max(0)
        head, row = divmod(int(at), values_Ht.shape[1])
        value, where = float(largest), f"{of.pattern}[{heads[head]},{first + row}]"
        if not math.isfinite(value):
            raise NotFinite(
                f"`{where}` does not follow from finite numbers",
                hint="`llmcli dump --name 'blocks.*'` names the first one that is not",
            )
        if value > self._worst.setdefault(check, (0.0, ""))[0]:
            self._worst[check] = value, where

    def see(self, block: Block, scores_HtS: Tensor, of: LayerMap, heads: Sequence[int]) -> None:
        """That the rows add up to 1, with what a sink takes, and which keys have a weight."""
        self._longest = max(self._longest, block.a_HtS.shape[2])
        off_Ht = block.a_HtS.sum(-1) - 1
        if block.taken_Ht is not None:
            self._sinks, off_Ht = True, off_Ht + block.taken_Ht
        self._add("row_sums", off_Ht.abs(), of, heads, block.first)
        self._add("masks", wrong_cells(block, scores_HtS), of, heads, block.first)

    def compare(
        self,
        block: Block,
        of: LayerMap,
        heads: Sequence[int],
        *,
        v_KSe: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        z_Hte: Tensor,
    ) -> None:
        """That the pattern times the values is what the kernel computed as `z`.

        Off may be the result in the model's own dtype, and the scores, which the kernel never
        writes, in at least float32: a score is as wrong as ‖q‖ ‖k‖ is large (`norms` of scaled
        queries and of keys; None: as the score itself).
        """
        size_HtS = block.a_HtS.shape
        a_KgS = block.a_HtS.reshape(len(v_KSe), -1, size_HtS[2])
        v_S = v_KSe.norm(dim=-1)
        if norms is None:
            q_Ht, k_S = torch.ones_like(z_Hte[..., 0]), torch.zeros_like(v_S)
        else:
            q_Ht, k_S = norms
        sizes_Kg3 = a_KgS @ torch.stack((v_S, k_S, k_S * v_S), -1)
        value_Ht, key_Ht, both_Ht = sizes_Kg3.reshape(*size_HtS[:2], 3).unbind(-1)
        if norms is None:
            own_KgS = torch.special.entr(a_KgS).abs()  # a · |log a|
            key_Ht = own_KgS.sum(-1).reshape(size_HtS[:2])
            both_Ht = (own_KgS @ v_S[..., None]).reshape(size_HtS[:2])
        mixed_Hte = (a_KgS @ v_KSe).reshape(*size_HtS[:2], -1)
        scores_off_Ht = q_Ht * (both_Ht + key_Ht * value_Ht)
        roundings = VALUE_ROUNDINGS * max(1.0, size_HtS[2] / VALUE_KEYS) ** 0.5
        allowed_Ht = roundings * self._wide_eps * (value_Ht + scores_off_Ht)
        allowed_Ht = allowed_Ht + self._narrow_off * value_Ht
        apart_Ht = (mixed_Hte - z_Hte).abs().amax(-1)
        share_Ht = torch.where(apart_Ht == 0, 0.0, apart_Ht / allowed_Ht)
        self._add("values", share_Ht, of, heads, block.first)

    def compare_signed(
        self,
        block: Block,
        of: LayerMap,
        heads: Sequence[int],
        *,
        v_KSe: Tensor,
        z_Hte: Tensor,
        sizes_Ht: Tensor,
        narrow: bool,
    ) -> None:
        """Checks the map of a recurrence: it reads no later token, and its product with the values
        is what the kernel computed as `z`.

        Its rows are no distribution. Off may be `z` by its own rounding, where it has 16 bits
        (`narrow`), and both by what `sizes_Ht` says, see `walk`.
        """
        leaks_Ht = ((block.a_HtS != 0) & block.after_tS).sum(-1)
        self._add("causal", leaks_Ht, of, heads, block.first)
        a_KgS = block.a_HtS.reshape(len(v_KSe), -1, block.a_HtS.shape[2])
        mixed_Hte = (a_KgS @ v_KSe).reshape(*block.a_HtS.shape[:2], -1)
        wide_Ht = ROUNDINGS * self._wide_eps * sizes_Ht
        allowed_Hte = wide_Ht[..., None].expand_as(mixed_Hte)
        if narrow:
            allowed_Hte = allowed_Hte + self._narrow_off / 2 * mixed_Hte.abs()
        apart_Hte = (mixed_Hte - z_Hte).abs()
        share_Hte = torch.where(apart_Hte == 0, 0.0, apart_Hte / allowed_Hte)
        self._add("values", share_Hte.amax(-1), of, heads, block.first)

    def checks(self) -> tuple[ViewCheck, ...]:
        """Of rows, masks and values, over all that was seen.

        Of maps that are no distributions `causal` stands in place of the first two.
        """
        sink = " and its head's sink" if self._sinks else ""
        sums = SUM_ROUNDINGS * self._wide_eps * math.sqrt(self._longest / SUM_KEYS)
        every = {
            "row_sums": f"in the pattern shown the weights of every query{sink} add up to 1",
            "masks": "in the pattern shown every query sees the keys that it may, others are 0",
            "causal": "in the signed maps shown weights of tokens after the query are 0",
            "values": "the pattern shown · values is the kernel's own z, but for roundings",
        }
        tolerances = {"row_sums": sums, "values": 1.0}  # else it has to be 0
        return tuple(
            ViewCheck(
                name=name,
                words=words,
                value=self._worst[name][0],
                tolerance=tolerances.get(name, 0.0),
                where=self._worst[name][1],
            )
            for name, words in every.items()
            if name in self._worst
        )


def wrong_cells(block: Block, scores_HtS: Tensor) -> Tensor:
    """How many cells of each row are masked and should not be, or the other way: `[H, t]`.

    A masked cell has the weight 0 and the score -∞. Which cells are is computed anew: row i sees
    its last `seen_t` keys. Keys that all rows or none see are compared as a whole.
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
