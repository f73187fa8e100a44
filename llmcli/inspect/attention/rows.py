"""Rows of the maps of one layer's heads, block by block, each checked when it comes.

Axes: H heads, K key/value heads, t rows (queries), S keys, d size of a query and key, e of a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llmcli.inspect.attention.block import CELLS, Block, Tokens
from llmcli.inspect.attention.checks import AttentionChecks
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.recurrence import CHUNK, Walk, walk
from llmcli.ops.norm import at_least_float32


class Rows(NamedTuple):
    """Some rows of the heads `at` in the list of chosen heads; a signed map has no scores."""

    at: slice
    block: Block
    scores_HtS: Tensor | None

    def masked(self, values_HtS: Tensor) -> Tensor:
        """The `values` of all cells, -∞ where masked."""
        hidden = self.block.after_tS if self.scores_HtS is None else self.scores_HtS == -math.inf
        return values_HtS.masked_fill(hidden, -math.inf)


def checked_rows(
    proof: AttentionChecks,
    of: LayerMap,
    heads: Sequence[int],
    tokens: Tokens,
    seen: Mapping[str, Tensor],
    rows: int | None = None,
    walked: Walk | None = None,
) -> Iterator[Rows]:
    """The rows of all queries, block by block.

    `heads` are the chosen heads, `seen` the activations `[H, T, d]` of all heads and tokens.
    `rows`: rows at a time (None: as memory allows). Each block has passed through `proof`,
    which compares it with the kernel's own result, when it comes.
    `walked`: through all tokens, where the map is signed (None: it is walked here). Raises
    NotFinite.
    """
    v_KSe, z_HTe = seen[of.value], seen[of.mixed]
    if of.signed and walked is None:
        walked = walk(of.recurrence(seen))
    count = z_HTe.shape[1]
    for at, kv in _shares(of, heads, count):
        ours = heads[at]
        v, z = at_least_float32(v_KSe[kv]), at_least_float32(z_HTe[ours])
        most = rows or _block_rows(of.window, len(ours), count)
        if walked is not None and rows is None:
            most = max(most - most % CHUNK, min(most, CHUNK))
        map_rows = of.map(seen, ours) if of.signed else None
        for position in range(0, count, most):
            z_Hte = z[:, position : position + most]
            last = position + z_Hte.shape[1]
            # only the keys that some row sees, and one more at both ends: a mask off by one shows
            low = 0 if of.window is None else max(0, position - of.window)
            keys = slice(low, last + 1)
            if map_rows is not None and walked is not None:
                a_HtS = map_rows(slice(position, last))[:, :, keys]
                seen_t = torch.arange(position + 1, last + 1, device=a_HtS.device)
                block = Block(a_HtS, position, low, seen_t, tokens)
                proof.compare_signed(
                    block, of, ours, v_KSe=v[:, keys], z_Hte=z_Hte,
                    sizes_Ht=walked.sizes_HT[ours, position:last].to(z),
                    narrow=z_HTe.dtype.itemsize == 2,
                )  # fmt: skip
                yield Rows(at, block, None)
                continue
            scores_HtS, norms = of.rows(seen, ours, slice(position, last), keys)
            seen_t = torch.arange(position + 1, last + 1, device=scores_HtS.device)
            seen_t = seen_t if of.window is None else seen_t.clamp_max(of.window)
            a_HtS, taken_Ht = of.weights(scores_HtS, ours), of.taken(scores_HtS, ours)
            block = Block(a_HtS, position, low, seen_t, tokens, taken_Ht)
            proof.see(block, scores_HtS, of, ours)
            proof.compare(block, of, ours, v_KSe=v[:, keys], norms=norms, z_Hte=z_Hte)
            yield Rows(at, block, scores_HtS)


def _block_rows(window: int | None, heads: int, keys: int) -> int:
    """The most rows of a block; with a window few enough that most cells are not masked."""
    if window is None:
        return max(1, CELLS // (heads * keys))
    width = 2 * (window + 32)  # of the block: its rows, and a window before the first
    return max(1, min(width - window - 2, CELLS // (heads * min(keys, width))))


def _shares(
    of: LayerMap, heads: Sequence[int], tokens: int
) -> Iterator[tuple[slice, slice]]:
    """Which of `heads` are computed together, and their key/value heads.

    Heads of one key/value head; of several where all heads are wanted and rows are short.
    """
    together = 1
    if len(heads) == of.heads:
        together = max(1, CELLS // (of.group * tokens**2))
    for kv in range(0, of.heads // of.group, together):
        those = range(kv * of.group, (kv + together) * of.group)
        ours = [i for i, head in enumerate(heads) if head in those]
        if ours:
            yield slice(ours[0], ours[-1] + 1), slice(kv, kv + together)
