"""One layer: its rows, block by block, through everything that is requested of them.

Axes: H heads, K key/value heads, t rows (queries), S keys, d size of a query and key, e of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from llmcli.commands.attention.measure.kept import Pooled, TopPairs, Whole
from llmcli.commands.attention.measure.metrics import RowMeans, effective_rank, labels_of
from llmcli.commands.attention.report.heads import HeadReport, LayerReport
from llmcli.commands.attention.report.request import AttentionRequest
from llmcli.inspect.attention.block import Block, Tokens
from llmcli.inspect.attention.checks import AttentionChecks
from llmcli.inspect.attention.rows import Rows, checked_rows
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.recurrence import Walk, walk
from llmcli.model import Model
from llmcli.records.head_metrics import HALF_LIFE, LABELS, OVERWRITTEN, RANK, USUAL
from llmcli.records.matrix import Matrix

OnMatrix = Callable[[int, np.ndarray], None]


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
    proof: AttentionChecks
    pairs: TopPairs
    advance: Callable[[int], None]


class Layer:
    """The requested `heads` of one layer over so many `tokens`."""

    def __init__(
        self, model: Model, of: LayerMap, heads: Sequence[int], tokens: int, shared: Shared
    ) -> None:
        self.number = of.number
        self.of = of
        self.heads = list(heads)
        self._request = request = shared.request
        self._shared = shared
        dtype = model.stream_dtype
        needed = {*shared.metrics, *(label.metric for label in LABELS)}
        self._means = RowMeans(tuple(name for name in USUAL if name in needed), len(self.heads))
        self._pooled = None
        if request.drawn:
            self._pooled = Pooled(request, len(self.heads), tokens, signed=of.signed)
        self._ranked = None
        if RANK in shared.metrics:
            self._ranked = Whole(len(self.heads), tokens, 0.0, dtype)
        masked = 0.0 if request.what == "pattern" else -math.inf
        self._exported = None
        if shared.on_matrix is not None:
            self._exported = Whole(len(self.heads), tokens, masked, dtype)

    def read(
        self, tokens: Tokens, seen: Mapping[str, Tensor], undetermined: Container[str]
    ) -> tuple[LayerReport, tuple[Matrix, ...], dict[str, int]]:
        """The report of the layer, its matrices, and how many rows each metric counts.

        `seen` are its activations (see `checked_rows`); no head is of the kinds that are
        `undetermined`. Hands whole matrices on where `on_matrix` takes them.
        """
        walked = walk(self.of.recurrence(seen)) if self.of.signed else None
        shown = checked_rows(
            self._shared.proof, self.of, self.heads, tokens, seen, self._shared.block_rows, walked,
        )  # fmt: skip
        for rows in shown:
            self._keep(rows)
            self._summarize(rows.block, rows.at)
            self._shared.advance(rows.block.a_HtS[:, :, 0].numel())
        if self._exported is not None and self._shared.on_matrix is not None:
            self._shared.on_matrix(self.number, self._exported.values_HTS.numpy())
        report, counts = self._report(walked, len(tokens.ids_N), undetermined)
        return report, self._matrices(), counts

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

    def _summarize(self, block: Block, at: slice) -> None:
        """Metrics and pairs.

        Of a signed map metrics are of |A| / Σ_j |A|, by which pairs are ranked, too; its rank is
        that of A itself.
        """
        summed = block.shares() if self.of.signed else block
        self._shared.pairs.add(block, summed.a_HtS, self.number, self.heads[at], self.of.group)
        self._means.add(summed, at)
        if self._ranked is not None:
            self._ranked.add(block.a_HtS.nan_to_num(0.0), at, block.first, block.low)

    def _report(
        self, walked: Walk | None, tokens: int, undetermined: Container[str]
    ) -> tuple[LayerReport, dict[str, int]]:
        metrics, counts = self._means.means(), self._means.rows()
        if self._ranked is not None:
            ranks = effective_rank(self._ranked.values_HTS).tolist()
            metrics = [one | {RANK: rank} for one, rank in zip(metrics, ranks, strict=True)]
        memory = dict.fromkeys((HALF_LIFE, OVERWRITTEN), [math.nan] * self.of.heads)
        if walked is not None:
            memory = {HALF_LIFE: walked.half_lives(), OVERWRITTEN: walked.overwritten()}
            counts |= dict.fromkeys(memory, tokens)
        metrics = [
            one | {name: values[head] for name, values in memory.items()}
            for one, head in zip(metrics, self.heads, strict=True)
        ]
        report = LayerReport(
            layer=self.number,
            kind=self.of.kind,
            sinks=self.of.sinks,
            signed=self.of.signed,
            note=self.of.note,
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
        return report, counts

    def _matrices(self) -> tuple[Matrix, ...]:
        if self._pooled is None:
            return ()
        found = []
        for at, head in enumerate(self.heads):
            queries, keys, values = self._pooled.cells(at)
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
