"""One layer: its rows, block by block, through everything that is requested of them.

Axes: H heads, K key/value heads, t rows (queries), S keys, d size of a query and key, e of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from llmcli.commands.attention.measure.kept import Pooled, TopPairs, Whole
from llmcli.commands.attention.measure.metrics import RowMeans, effective_rank, labels_of
from llmcli.commands.attention.report.heads import HeadReport, LayerReport
from llmcli.commands.attention.report.request import AttentionRequest
from llmcli.model import Model
from llmcli.observe.attention.block import Block, Tokens
from llmcli.observe.attention.checks import Proof
from llmcli.observe.attention.rows import Rows, proven
from llmcli.observe.layer_map import LayerMap
from llmcli.observe.recurrence import Walk, walk
from llmcli.reports.head_metrics import HALF_LIFE, LABELS, OVERWRITTEN, RANK, USUAL
from llmcli.reports.matrix import Matrix

OnMatrix = Callable[[int, np.ndarray], None]
_AT_ONCE = 1 << 22  # numbers of a matrix, 32 MiB of float64


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the layers of one pass share.

    `metrics` that are computed. `on_matrix(layer, [H, T, S])` takes whole matrices. `block_rows`:
    so many rows at a time, None by memory. `advance(rows)` is called with how many rows of how many
    heads, multiplied, are done.
    """

    request: AttentionRequest
    metrics: tuple[str, ...]
    on_matrix: OnMatrix | None
    block_rows: int | None
    proof: Proof
    pairs: TopPairs
    advance: Callable[[int], None]


class Layer:
    """The requested `heads` of one layer; `most` is the most tokens that there will be."""

    def __init__(
        self, model: Model, of: LayerMap, heads: Sequence[int], most: int, shared: Shared
    ) -> None:
        self.number = of.number
        self.of = of
        self.heads = list(heads)
        self._w_o = None if of.output is None else model.decoder.weight(of.output)
        self._request = request = shared.request
        self._shared = shared
        dtype = model.stream_dtype
        needed = {*shared.metrics, *(label.metric for label in LABELS)}
        self._means = RowMeans(tuple(name for name in USUAL if name in needed), len(self.heads))
        self._walked: Walk | None = None
        self._pooled = None
        if request.drawn:
            self._pooled = Pooled(request, len(self.heads), most, signed=of.signed)
        self._ranked = Whole(len(self.heads), most, 0.0, dtype) if RANK in shared.metrics else None
        masked = 0.0 if request.what == "pattern" else -math.inf
        self._exported = None
        if shared.on_matrix is not None:
            self._exported = Whole(len(self.heads), most, masked, dtype)

    def add(self, first: int, tokens: Tokens, seen: Mapping[str, Tensor]) -> None:
        """The rows of the queries from position `first` on; see `proven`."""
        if self.of.signed:
            self._walked = walk(self.of.recurrence(seen))
        shown = proven(
            self._shared.proof, self.of, self.heads, first, tokens, seen, self._shared.block_rows,
            self._walked,
        )  # fmt: skip
        norms_HS, of = None, None
        for rows in shown:
            if self._request.weighted and of != rows.at:
                of, norms_HS = rows.at, self._norms(rows.v_KSe, self.heads[rows.at])
            keys = slice(rows.block.low, rows.block.low + rows.block.a_HtS.shape[2])
            self._keep(rows)
            self._summarize(rows.block, None if norms_HS is None else norms_HS[:, keys], rows.at)
            self._shared.advance(rows.block.a_HtS[:, :, 0].numel())

    @property
    def walked(self) -> Walk | None:
        """Where the last rows ended, of a recurrence."""
        return self._walked

    def _keep(self, rows: Rows) -> None:
        block, scores_HtS = rows.block, rows.scores_HtS
        shown_HtS = block.a_HtS
        if self._request.what == "scores":
            assert scores_HtS is not None
            shown_HtS = scores_HtS
        if self._exported is not None:
            self._exported.add(shown_HtS, rows.at, block.first, block.low)
        if self._pooled is not None:
            self._pooled.add(rows.masked(shown_HtS), rows.at, block.first, block.low)

    def _summarize(self, block: Block, norms_HS: Tensor | None, at: slice) -> None:
        """Metrics and pairs; with `norms_HS` of what is really moved, A[i,j] ‖v_j W_O‖.

        Of a signed map metrics are of |A| / Σ_j |A|, by which pairs are ranked, too; its rank is
        that of A itself.
        """
        summed = block.shares() if self.of.signed else block
        ranks_HtS, ranked_HtS = summed.a_HtS, block.a_HtS
        if norms_HS is not None:
            moved = replace(block, a_HtS=block.a_HtS * norms_HS[:, None])
            ranks_HtS = moved.a_HtS.abs()
            summed = moved.shares()
            summed = summed if self.of.signed else replace(summed, negative_Ht=None)
            ranked_HtS = summed.a_HtS.copysign(block.a_HtS)
        self._shared.pairs.add(block, ranks_HtS, self.number, self.heads[at], self.of.group)
        self._means.add(summed, at)
        if self._ranked is not None:
            self._ranked.add(ranked_HtS.nan_to_num(0.0), at, block.first, block.low)

    def _norms(self, v_KSe: Tensor, heads: list[int]) -> Tensor:
        """‖v_j W_O‖ of every head's part of W_O and every key: `[H, S]`.

        As `√(v G vᵀ)`, G = W_O W_Oᵀ of the head, so that no `[S, D]` is made of it.
        """
        norms = []
        for i, head in enumerate(heads):
            v_Se = v_KSe[i * len(v_KSe) // len(heads)].cpu().double()
            moved_Se = v_Se if self._products_Hee is None else v_Se @ self._products_Hee[head]
            squares_S = (moved_Se * v_Se).sum(-1)
            norms.append(squares_S.clamp_min(0).sqrt())
        return torch.stack(norms).to(v_KSe.dtype).to(v_KSe.device)

    @cached_property
    def _products_Hee(self) -> Tensor | None:
        """W_O W_Oᵀ of every head, in float64; some of the matrix at a time."""
        if self._w_o is None:
            return None
        rows, columns = self._w_o.shape
        size = columns // self.of.heads
        found_Hee = torch.zeros(self.of.heads, size, size, dtype=torch.float64)
        step = max(1, _AT_ONCE // columns)
        for first in range(0, rows, step):
            w_DK = self._w_o.dense(rows=slice(first, first + step)).cpu().double()
            w_HeD = w_DK.view(-1, self.of.heads, size).permute(1, 2, 0)
            found_Hee += w_HeD @ w_HeD.mT
        return found_Hee

    def finish(
        self, tokens: int, undetermined: Container[str]
    ) -> tuple[LayerReport, tuple[Matrix, ...], dict[str, int]]:
        """The report of the layer, its matrices, and how many rows each metric counts.

        No head is of the kinds that are `undetermined`.

        Hands the whole matrices on where somebody takes them, and forgets them.
        """
        metrics, counts = self._means.means(), self._means.rows()
        if self._ranked is not None:
            ranks = effective_rank(self._ranked.values_HTS[:, :tokens, :tokens]).tolist()
            metrics = [one | {RANK: rank} for one, rank in zip(metrics, ranks, strict=True)]
        memory = dict.fromkeys((HALF_LIFE, OVERWRITTEN), [math.nan] * self.of.heads)
        if (walked := self._walked) is not None:
            memory = {HALF_LIFE: walked.half_lives(), OVERWRITTEN: walked.overwritten()}
            counts |= dict.fromkeys(memory, tokens)
        metrics = [
            one | {name: values[head] for name, values in memory.items()}
            for one, head in zip(metrics, self.heads, strict=True)
        ]
        if self._exported is not None and self._shared.on_matrix is not None:
            shown_HTS = self._exported.values_HTS[:, :tokens, :tokens]
            self._shared.on_matrix(self.number, shown_HTS.numpy())
        self._ranked = self._exported = self._walked = None
        report = LayerReport(
            layer=self.number,
            kind=self.of.kind,
            sinks=self.of.sinks,
            signed=self.of.signed,
            note=self.of.note,
            projected=self.of.projected,
            kv_heads=self.of.heads // self.of.group,
            heads=tuple(
                HeadReport(
                    head=head,
                    kv_head=head // self.of.group,
                    metrics={name: found[name] for name in self._shared.metrics},
                    labels=labels_of(found, undetermined),
                )
                for head, found in zip(self.heads, metrics, strict=True)
            ),
        )
        return report, self._matrices(tokens), counts

    def _matrices(self, tokens: int) -> tuple[Matrix, ...]:
        if self._pooled is None:
            return ()
        found = []
        for at, head in enumerate(self.heads):
            queries, keys, values = self._pooled.cells(at, tokens)
            found.append(
                Matrix(
                    layer=self.number,
                    head=head,
                    kv_head=head // self.of.group,
                    queries=queries,
                    keys=keys,
                    pool=self._pooled.pool,
                    values=values,
                    signed=self.of.signed,
                )
            )
        return tuple(found)
