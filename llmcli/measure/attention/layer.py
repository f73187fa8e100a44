"""One layer: its rows, block by block, through everything that is wanted of them.

Axes: H heads, K key/value heads, t rows (queries), S keys, d size of a query and key, e of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from llmcli.measure.attention.averages import Averages
from llmcli.measure.attention.block import CELLS, Block, Tokens
from llmcli.measure.attention.checks import Proof
from llmcli.measure.attention.labels import LABELS, labels_of
from llmcli.measure.attention.metrics import RowMeans, effective_rank
from llmcli.measure.attention.pairs import TopPairs
from llmcli.measure.attention.pooled import Pooled, Whole
from llmcli.measure.attention.wanted import Wanted
from llmcli.model import Model
from llmcli.reports.attention import HeadReport, LayerReport, Matrix
from llmcli.reports.head_metrics import RANK, USUAL


def kind_of(window: int | None) -> str:
    """What a layer with that window is called."""
    return "full" if window is None else f"window {window}"


class Layer:
    """What is found out of one layer; `most` is the most tokens that there will be.

    `advance(rows)` is told how many rows of how many heads, multiplied, are done.
    """

    def __init__(
        self,
        model: Model,
        number: int,
        wanted: Wanted,
        most: int,
        *,
        proof: Proof,
        pairs: TopPairs,
        advance: Callable[[int], None],
    ) -> None:
        self.number = number
        self.config = config = model.config.layers[number].mixer
        self.group = config.heads // config.kv_heads
        self.heads = wanted.heads_of(config.heads)
        self._mixer = model.decoder.blocks[number].mixer
        self._w_o = model.decoder.slots[f"blocks.{number}.attn.W_o"]
        self._wanted = wanted
        self._proof = proof
        self._pairs = pairs
        self._advance = advance
        wide = model.stream_dtype
        needed = {*wanted.metrics, *(label.metric for label in LABELS)}
        self._means = RowMeans(tuple(name for name in USUAL if name in needed), len(self.heads))
        self._pooled = None
        if wanted.matrices is not None:
            self._pooled = Pooled(wanted.matrices, len(self.heads), most)
        self._ranked = Whole(len(self.heads), most, 0.0, wide) if RANK in wanted.metrics else None
        masked = 0.0 if wanted.what == "pattern" else -math.inf
        self._exported = None
        if wanted.on_matrix is not None:
            self._exported = Whole(len(self.heads), most, masked, wide)

    def add(
        self,
        first: int,
        tokens: Tokens,
        *,
        q_HTd: Tensor,
        k_KSd: Tensor,
        v_KSe: Tensor,
        z_HTe: Tensor,
    ) -> None:
        """The rows of the queries from position `first` on, with all keys from position 0 on."""
        rows, keys = q_HTd.shape[1], k_KSd.shape[1]
        for at, kv in self._shares(rows, keys):
            heads = self.heads[at]
            q, k, v, z = (
                part.to(torch.promote_types(part.dtype, torch.float32))
                for part in (q_HTd[heads], k_KSd[kv], v_KSe[kv], z_HTe[heads])
            )
            norms_HS = self._norms(v, heads) if self._weighs else None
            most = self._wanted.block_rows or self._block_rows(len(heads), keys)
            averages = self._proof.averages(len(heads), tokens.ids_N[first : first + rows])
            for begin in range(0, rows, most):
                part = slice(begin, begin + most)
                self._block(
                    at, first + begin, tokens, norms_HS,
                    q_Htd=q[:, part], k_KSd=k, v_KSe=v, z_Hte=z[:, part],
                    averages=None if averages is None else (averages, begin),
                )  # fmt: skip
                self._advance(len(heads) * len(q[0, part]))
            if averages is not None:
                self._proof.settle(averages, self.number, heads)

    def _block_rows(self, heads: int, keys: int) -> int:
        """How many rows a block may have; under a window not so many that most is masked."""
        window = self.config.window
        if window is None:
            return max(1, CELLS // (heads * keys))
        width = 2 * (window + 32)  # of the block: its rows, and a window before the first
        return max(1, min(width - window - 2, CELLS // (heads * min(keys, width))))

    @property
    def _weighs(self) -> bool:
        wanted = self._wanted
        return wanted.weighted or (wanted.pairs > 0 and wanted.pairs_by == "weighted")

    def _shares(self, rows: int, keys: int) -> Iterator[tuple[slice, slice]]:
        """Which of our heads are computed together, and their key/value heads.

        Those of one key/value head; of several where all heads are wanted and rows are short.
        """
        together = 1
        if len(self.heads) == self.config.heads:
            together = max(1, CELLS // (self.group * rows * keys))
        for kv in range(0, self.config.kv_heads, together):
            of = range(kv * self.group, (kv + together) * self.group)
            ours = [i for i, head in enumerate(self.heads) if head in of]
            if ours:
                yield slice(ours[0], ours[-1] + 1), slice(kv, kv + together)

    def _block(
        self,
        at: slice,
        first: int,
        tokens: Tokens,
        norms_HS: Tensor | None,
        *,
        q_Htd: Tensor,
        k_KSd: Tensor,
        v_KSe: Tensor,
        z_Hte: Tensor,
        averages: tuple[Averages, int] | None,
    ) -> None:
        """Only the keys that some row sees, and one more at both ends: a mask off by one shows."""
        rows, window = q_Htd.shape[1], self.config.window
        low = 0 if window is None else max(0, first - window)
        keys = slice(low, first + rows + 1)
        k_KSd, v_KSe = k_KSd[:, keys], v_KSe[:, keys]
        scores_HtS = self._mixer.score_rows(q_Htd[None], k_KSd[None], first - low)[0]
        seen_t = torch.arange(first + 1, first + rows + 1, device=scores_HtS.device)
        seen_t = seen_t if window is None else seen_t.clamp_max(window)
        block = Block(scores_HtS.softmax(-1), first, low, seen_t, tokens)
        heads = self.heads[at]
        self._proof.see(block, scores_HtS, self.number, heads)
        self._proof.compare(
            block, scores_HtS, self.number, heads, v_KSe=v_KSe, k_KSd=k_KSd,
            scaled_q_Htd=q_Htd * self.config.scale, z_Hte=z_Hte, averages=averages,
        )  # fmt: skip
        self._keep(block, scores_HtS, at)
        self._summarize(block, None if norms_HS is None else norms_HS[:, keys], at)

    def _keep(self, block: Block, scores_HtS: Tensor, at: slice) -> None:
        pattern = self._wanted.what == "pattern"
        if self._exported is not None:
            shown_HtS = block.a_HtS if pattern else scores_HtS
            self._exported.add(shown_HtS, at, block.first, block.low)
        if self._pooled is not None:
            masked_HtS = scores_HtS == -math.inf
            shown_HtS = block.a_HtS.masked_fill(masked_HtS, -math.inf) if pattern else scores_HtS
            self._pooled.add(shown_HtS, at, block.first, block.low)

    def _summarize(self, block: Block, norms_HS: Tensor | None, at: slice) -> None:
        """Metrics and pairs; with `norms_HS` of what is really moved, A[i,j] ‖v_j W_O‖."""
        ranks_HtS, summed = block.a_HtS, block
        if norms_HS is not None:
            moved_HtS = block.a_HtS * norms_HS[:, None]
            if self._wanted.pairs_by == "weighted":
                ranks_HtS = moved_HtS
            if self._wanted.weighted:
                summed = replace(block, a_HtS=moved_HtS / moved_HtS.sum(-1, keepdim=True))
        self._pairs.add(block, ranks_HtS, self.number, self.heads[at], self.group)
        self._means.add(summed, at)
        if self._ranked is not None:
            self._ranked.add(summed.a_HtS.nan_to_num(0.0), at, block.first, block.low)

    def _norms(self, v_KSe: Tensor, heads: list[int]) -> Tensor:
        """‖v_j W_O‖ of every head's part of W_O and every key: `[H, S]`.

        As `√(v G vᵀ)`, G = W_O W_Oᵀ of the head, so that no `[S, D]` is made of it.
        """
        size = self.config.value_dim
        norms = []
        for i, head in enumerate(heads):
            w_eD = self._w_o.t()[head * size : (head + 1) * size].cpu().double()
            v_Se = v_KSe[i * len(v_KSe) // len(heads)].cpu().double()
            squares_S = (v_Se @ (w_eD @ w_eD.t()) * v_Se).sum(-1)
            norms.append(squares_S.clamp_min(0).sqrt())
        return torch.stack(norms).to(v_KSe.dtype).to(v_KSe.device)

    def finish(
        self, tokens: int, untold: Container[str]
    ) -> tuple[LayerReport, tuple[Matrix, ...], dict[str, int]]:
        """The report of the layer, its matrices, and how many rows each metric counts.

        No head is of the kinds `untold`.

        Hands the whole matrices on where they are asked for, and forgets them.
        """
        metrics = self._means.means()
        if self._ranked is not None:
            ranks = effective_rank(self._ranked.values_HTS[:, :tokens, :tokens])
            metrics = [one | {RANK: rank} for one, rank in zip(metrics, ranks, strict=True)]
        if self._exported is not None and self._wanted.on_matrix is not None:
            shown_HTS = self._exported.values_HTS[:, :tokens, :tokens]
            self._wanted.on_matrix(self.number, shown_HTS.numpy())
        self._ranked = self._exported = None
        report = LayerReport(
            layer=self.number,
            kind=kind_of(self.config.window),
            kv_heads=self.config.kv_heads,
            heads=tuple(
                HeadReport(
                    head=head,
                    kv_head=head // self.group,
                    metrics={name: found[name] for name in self._wanted.metrics},
                    labels=labels_of(found, untold),
                )
                for head, found in zip(self.heads, metrics, strict=True)
            ),
        )
        return report, self._matrices(tokens), self._means.rows()

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
                    kv_head=head // self.group,
                    queries=queries,
                    keys=keys,
                    pool=self._pooled.pool,
                    values=values,
                )
            )
        return tuple(found)
