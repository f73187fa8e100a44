"""One forward pass, which measures the attention of each layer while it is computed.

Of the rows it keeps metrics, the largest pairs, the parts of matrices that are drawn, whole ones.

Axes: H heads, t rows (queries), S keys, T tokens, R rows and C columns of what is drawn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli import devices
from llmcli.commands.attention.measure.metrics import (
    RowMeans,
    effective_rank,
    labels_of,
    undetermined_kinds,
)
from llmcli.commands.attention.options import AttentionOptions, Span, unknown_metrics
from llmcli.commands.attention.report import AttentionReport, HeadReport, LayerReport, Pair, grouped
from llmcli.errors import UsageError
from llmcli.inspect.attention import AttentionChecks, Block, Rows, Tokens, checked_rows
from llmcli.inspect.formulas import formula_checks, some_rows, worst
from llmcli.inspect.kernel import layer_of
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.passes import Passes
from llmcli.inspect.recurrence import Walk, walk
from llmcli.model import Model, dtype_name
from llmcli.records.checks import ViewCheck
from llmcli.records.head_metrics import (
    HALF_LIFE,
    LABELS,
    METRICS,
    MOST_RANKED,
    OVERWRITTEN,
    RANK,
)
from llmcli.records.matrix import Matrix
from llmcli.records.progress import Progress

# of a longer prompt so many rows of what is a product are held against the formulas of `explain`
FORMULA_ROWS = 12
MOST_CELLS = 480  # of a side of a matrix that is drawn: more than any terminal is wide

OnMatrix = Callable[[int, np.ndarray], None]
Seen = dict[str, Tensor]


def measure_attention(
    model: Model,
    ids: Sequence[int],
    heads: AttentionOptions | None = None,
    *,
    generate: int = 0,
    on_matrix: OnMatrix | None = None,
    block_rows: int | None = None,
    progress: Progress | None = None,
) -> AttentionReport:
    """What the chosen heads of `ids`, and of up to `generate` tokens after them, attend to.

    Metrics that no head of the model has are left out. `on_matrix(layer, [H, T, S])` is given
    weights, or scores (-∞ where masked), float32 (float64 where the model is), of the chosen
    heads, layer by layer in order. `block_rows`: so many rows at a time (default: by memory);
    numbers depend on it by rounding.

    New tokens are generated first; then one usual forward pass reads all tokens. Nothing `[T, T]`
    is kept but for `on_matrix`, one layer at a time, and `effective_rank`. Raises UsageError for
    what the model does not have and for spans after the end of the text, OutOfMemory, and NotFinite
    for NaN.
    """
    heads = heads or AttentionOptions()
    passes = Passes(model, ids, generate, progress)
    part = heads.part(passes.most)  # an earlier end of the text moves no span
    passes.write()
    written = len(passes.ids)
    for option, (first, _) in zip(("--query", "--key"), part, strict=True):
        if first >= written:
            raise UsageError(
                f"`{option}` from {first} on selects no tokens: the model ended its text after "
                f"{written - len(ids)} of {generate} tokens",
                hint=f"positions go from 0 to {written - 1}",
            )
    look = _Look(passes, heads, part, on_matrix, block_rows)
    tap = LayerWatch([LayerMap(model, number) for number in look.heads], look.settle)
    passes.at_once(tap, logits="last", until=max(look.heads))
    return look.report()


class LayerWatch:
    """A tap: `settle(of, seen)` is called once for each of `maps`, when its layer is complete.

    `seen` are all of `LayerMap.inputs`, which are then forgotten, but for those that are of another
    layer: keys and values that are lent.
    """

    def __init__(
        self, maps: Iterable[LayerMap], settle: Callable[[LayerMap, Seen], None]
    ) -> None:
        self._ends, self._settle = {of.adds: of for of in maps}, settle
        inputs = [(name, of.number) for of in self._ends.values() for name in of.inputs]
        self._needed = {name for name, _ in inputs}
        self._lent = {name for name, number in inputs if layer_of(name) != number}
        self._seen: Seen = {}

    def __call__(self, name: str, tensor: Tensor) -> None:
        """An activation of all tokens."""
        if name in self._needed:
            self._seen[name] = tensor
        if name in self._ends:
            of = self._ends[name]
            self._settle(of, {one: self._seen[one] for one in of.inputs})
            self._seen = {one: kept for one, kept in self._seen.items() if one in self._lent}


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
        top, begin = ((of.start - span[0]) // self.pool
                      for of, span in ((rows, self.queries), (keys, self.keys)))  # fmt: skip
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


class _Kept:
    """What is kept of the rows of one layer."""

    def __init__(self, look: _Look, of: LayerMap) -> None:
        self.of, self.heads, count = of, list(look.heads[of.number]), len(look.ids)
        self._scores, dtype = look.options.matrices == "scores", look.model.stream_dtype
        self._means = RowMeans(len(self.heads))
        self._pooled = self._ranked = self.exported = None
        if look.options.drawn(look.heads):
            self._pooled = Pooled(look.part, MOST_CELLS, len(self.heads), count, signed=of.signed)
        if RANK in look.metrics:
            self._ranked = Whole(len(self.heads), count, 0.0, dtype)
        if look.on_matrix is not None:
            masked = -math.inf if self._scores else 0.0
            self.exported = Whole(len(self.heads), count, masked, dtype)

    def add(self, rows: Rows) -> Tensor:
        """Adds rows; returns what their pairs are ranked by.

        For a signed map that is |A| / Σ_j |A|, as for metrics; its effective rank is that of A.
        """
        block, at = rows.block, rows.at
        shown_HtS = rows.scores_HtS if self._scores else block.a_HtS
        assert shown_HtS is not None
        if self.exported is not None:
            self.exported.add(shown_HtS, at, block.first, block.low)
        if self._pooled is not None:
            self._pooled.add(rows.masked(shown_HtS), at, block.first, block.low)
        if self._ranked is not None:
            self._ranked.add(block.a_HtS.nan_to_num(0.0), at, block.first, block.low)
        summed = block.shares() if self.of.signed else block
        self._means.add(summed, at)
        return summed.a_HtS

    def metrics(
        self, walked: Walk | None, tokens: int
    ) -> tuple[list[dict[str, float]], dict[str, int]]:
        """The metrics of each head, and how many rows each of them counts."""
        found, counts = self._means.means(), self._means.rows()
        if self._ranked is not None:
            found[RANK] = effective_rank(self._ranked.values_HTS).tolist()
        memory = dict.fromkeys((HALF_LIFE, OVERWRITTEN), [math.nan] * self.of.heads)
        if walked is not None:
            memory = {HALF_LIFE: walked.half_lives(), OVERWRITTEN: walked.overwritten()}
            counts |= dict.fromkeys(memory, tokens)
        found |= {name: [values[head] for head in self.heads] for name, values in memory.items()}
        each = zip(*found.values(), strict=True)
        return [dict(zip(found, values, strict=True)) for values in each], counts

    def matrices(self) -> Iterator[Matrix]:
        """The part of each head's matrix that is drawn."""
        if self._pooled is None:
            return
        for at, head in enumerate(self.heads):
            yield Matrix(
                layer=self.of.number, head=head, kv_head=head // self.of.group,
                queries=self._pooled.queries, keys=self._pooled.keys, pool=self._pooled.pool,
                values=self._pooled.cells(at), signed=self.of.signed,
            )  # fmt: skip


class _Look:
    """What is found in one pass over all tokens, layer by layer; see `measure_attention`."""

    def __init__(
        self,
        passes: Passes,
        options: AttentionOptions,
        part: tuple[Span, Span],
        on_matrix: OnMatrix | None,
        block_rows: int | None,
    ) -> None:
        model, ids = passes.model, passes.ids
        self.model, self.ids, self.options, self.part = model, ids, options, part
        self.on_matrix, self.heads = on_matrix, options.heads_of(model.config)
        self._passes, self._block_rows = passes, block_rows
        unknown = unknown_metrics(model.config)
        self.metrics = [name for name in options.computed if name not in unknown]
        self._skipped: dict[str, str] = {}
        if RANK in self.metrics and len(ids) > MOST_RANKED:
            self.metrics.remove(RANK)
            few = f"up to {MOST_RANKED} tokens, and there are {len(ids)}"
            self._skipped[RANK] = f"it needs whole matrices: {few}"
        self._tokens = Tokens(list(ids), model.device)
        self._proof = AttentionChecks(model.dtype, model.device)
        self._pairs = TopPairs(options.top_pairs, part, model.config.bos)
        self._formulas: list[ViewCheck] = []
        self._reports: list[LayerReport] = []
        self._matrices: list[Matrix] = []
        self._rows: dict[str, int] = {}
        self._undetermined: dict[str, dict[str, str]] = {}  # kinds of heads, by the kind of layer
        self._done = 0

    def settle(self, of: LayerMap, seen: Seen) -> None:
        """Measures a layer, all of whose activations were `seen`."""
        self._formulas.append(
            formula_checks(self.model, self.ids, seen, of.checked, rows=FORMULA_ROWS)
        )
        if of.kind not in self._undetermined:
            self._undetermined[of.kind] = undetermined_kinds(
                self._tokens, len(self.ids), of.window, signed=of.signed
            )
        single = {name: seen[name][0] for name in of.reads}
        walked = walk(of.recurrence(single)) if of.signed else None
        kept, total = _Kept(self, of), len(self.ids) * sum(map(len, self.heads.values()))
        for rows in checked_rows(
            self._proof, of, kept.heads, self._tokens, single, self._block_rows, walked
        ):
            self._pairs.add(rows.block, kept.add(rows), of.number, kept.heads[rows.at], of.group)
            self._done += rows.block.a_HtS[:, :, 0].numel()
            self._passes.progress("looking at the heads", self._done, total)
        if kept.exported is not None and self.on_matrix is not None:
            self.on_matrix(of.number, kept.exported.values_HTS.numpy())
        metrics, counts = kept.metrics(walked, len(self.ids))
        self._rows |= {name: max(many, self._rows.get(name, 0)) for name, many in counts.items()}
        self._reports.append(self._layer(of, kept.heads, metrics))
        self._matrices += kept.matrices()

    def _layer(
        self, of: LayerMap, heads: Sequence[int], metrics: Sequence[Mapping[str, float]]
    ) -> LayerReport:
        return LayerReport(
            layer=of.number,
            kind=of.kind,
            sinks=of.sinks,
            signed=of.signed,
            note=of.note,
            kv_heads=of.heads // of.group,
            heads=tuple(
                HeadReport(
                    head=head,
                    kv_head=head // of.group,
                    metrics={name: found[name] for name in self.metrics},
                    labels=labels_of(found, self._undetermined[of.kind]),
                )
                for head, found in zip(heads, metrics, strict=True)
            ),
        )

    def report(self) -> AttentionReport:
        """What was seen."""
        words = "norm, projections, rotation, scores and output follow from their formulas"
        words += some_rows(FORMULA_ROWS, len(self.ids))
        formulas = replace(worst(self._formulas), words=words)
        return AttentionReport(
            what=self.options.matrices,
            dtype=dtype_name(self.model.dtype),
            tokens=self.model.tokens(self.ids),
            prompt_tokens=self._passes.prompt_tokens,
            metrics=tuple(metric for metric in METRICS if metric.name in self.metrics),
            rows={name: self._rows[name] for name in self.metrics if name in self._rows},
            labels=LABELS,
            layers=tuple(self._reports),
            matrices=tuple(self._matrices),
            part=self.part,
            pairs=tuple(self._pairs.pairs),
            checks=(*self._proof.checks(), formulas, *self._passes.checks),
            skipped=self._skipped,
            unlabelled=dict(self._unlabelled()),
        )

    def _unlabelled(self) -> Iterator[tuple[str, str]]:
        """The kinds that are undetermined, with the reason in every kind of layer."""
        for label in LABELS:
            kinds = grouped(
                (undetermined[label.name], kind)
                for kind, undetermined in self._undetermined.items() if label.name in undetermined
            )  # fmt: skip
            if [len(alike) for alike in kinds.values()] == [len(self._undetermined)]:
                yield label.name, next(iter(kinds))
            elif kinds:
                reasons = (f"{', '.join(alike)}: {why}" for why, alike in kinds.items())
                yield label.name, "; ".join(reasons)
