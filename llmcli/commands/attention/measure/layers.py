"""One forward pass, which measures each layer while it is computed: its attention, or its states.

Axes: H heads, t rows (queries), S keys, T tokens, d rows of a state, e columns, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from llmcli.commands.attention.measure.summaries import (
    Pooled,
    RowMeans,
    TopPairs,
    Whole,
    effective_rank,
    labels_of,
    undetermined_kinds,
)
from llmcli.commands.attention.options import AttentionOptions, Span, unknown_metrics
from llmcli.commands.attention.report import (
    AttentionReport,
    HeadReport,
    HeadStates,
    LayerReport,
    LayerStates,
    StatesReport,
    grouped,
)
from llmcli.errors import UsageError
from llmcli.inspect.attention import AttentionChecks, Tokens, checked_rows
from llmcli.inspect.formulas import formula_checks, some_rows, worst
from llmcli.inspect.kernel import layer_of, refuse_edited
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.passes import Passes
from llmcli.inspect.recurrence import walk
from llmcli.model import dtype_name
from llmcli.records.attention import (
    HALF_LIFE,
    LABELS,
    METRICS,
    MOST_RANKED,
    OVERWRITTEN,
    RANK,
    Matrix,
)
from llmcli.records.document import ViewCheck

# rows of a product that are compared with the formulas of `explain`, of a longer prompt
FORMULA_ROWS = 12
POINTS = 24  # positions at which states are measured
MOST_CELLS = 480  # of a side of a matrix that is drawn: more than any terminal is wide

OnMatrix = Callable[[int, np.ndarray], None]
Seen = dict[str, Tensor]


def measure_attention(
    passes: Passes,
    heads: AttentionOptions | None = None,
    *,
    on_matrix: OnMatrix | None = None,
    block_rows: int | None = None,
) -> AttentionReport:
    """What the chosen heads of all tokens, the new ones too, attend to.

    Metrics that no head of the model has are left out. `on_matrix(layer, [H, T, S])` is given
    weights, or scores (-∞ where masked), float32 (float64 where the model is), of the chosen
    heads, layer by layer in order. `block_rows`: rows at a time (default: by memory);
    numbers depend on it by rounding.

    New tokens are generated first; then one usual forward pass reads all tokens. Nothing `[T, T]`
    is kept but for `on_matrix`, one layer at a time, and `effective_rank`. Raises UsageError for
    what the model does not have and for spans after the end of the text, OutOfMemory, and NotFinite
    for NaN.
    """
    heads, prompt = heads or AttentionOptions(), passes.prompt_tokens
    part = heads.part(passes.most)  # an earlier end of the text moves no span
    passes.write()
    written = len(passes.ids)
    for option, (first, _) in zip(("--query", "--key"), part, strict=True):
        if first >= written:
            raise UsageError(
                f"`{option}` from {first} on selects no tokens: the model ended its text after "
                f"{written - prompt} of {passes.generate} tokens",
                hint=f"positions go from 0 to {written - 1}",
            )
    look = _Look(passes, heads, part, on_matrix, block_rows)
    maps = [LayerMap(passes.model, number) for number in look.heads]
    tap = LayerWatch(maps, look.settle)
    passes.at_once(tap, logits="last", until=max(look.heads))
    return look.report()


class LayerWatch:
    """A tap: `settle(of, seen)` is called once for each of `maps`, when its layer is complete.

    `seen` are all of `LayerMap.inputs`, which are then forgotten, but for those that are of another
    layer: keys and values that are shared.
    """

    def __init__(self, maps: Iterable[LayerMap], settle: Callable[[LayerMap, Seen], None]) -> None:
        self._ends, self._settle = {of.residual_update: of for of in maps}, settle
        for of in maps:
            refuse_edited(of.model, of.maps)
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
        self._proof = AttentionChecks(model.dtype, model.decoder.devices[0])
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
        heads, count, dtype = list(self.heads[of.number]), len(self.ids), self.model.stream_dtype
        scores = self.options.matrices == "scores"
        means, drawn, ranked, exported = RowMeans(len(heads)), None, None, None
        if self.options.drawn(self.heads):
            drawn = Pooled(self.part, MOST_CELLS, len(heads), count, signed=of.signed)
        if RANK in self.metrics:
            ranked = Whole(len(heads), count, 0.0, dtype)
        if self.on_matrix is not None:
            exported = Whole(len(heads), count, -math.inf if scores else 0.0, dtype)
        total = count * sum(map(len, self.heads.values()))
        for block in checked_rows(
            self._proof, of, heads, self._tokens, single, self._block_rows, walked
        ):
            at, shown_HtS = block.at, block.scores_HtS if scores else block.a_HtS
            assert shown_HtS is not None
            if exported is not None:
                exported.add(shown_HtS, at, block.first, block.low)
            if drawn is not None:
                drawn.add(block.masked(shown_HtS), at, block.first, block.low)
            if ranked is not None:
                ranked.add(block.a_HtS.nan_to_num(0.0), at, block.first, block.low)
            # metrics and ranks of pairs are of |A| / Σ_j |A| of a signed map, its rank is of A
            summed = block.shares() if of.signed else block
            means.add(summed)
            self._pairs.add(block, summed.a_HtS, of.number, heads[at], of.group)
            self._done += block.a_HtS[:, :, 0].numel()
            self._passes.progress("looking at the heads", self._done, total)
        if exported is not None and self.on_matrix is not None:
            self.on_matrix(of.number, exported.values_HTS.numpy())
        found, counts = means.means(), means.rows()
        if ranked is not None:
            found[RANK] = effective_rank(ranked.values_HTS).tolist()
        memory = dict.fromkeys((HALF_LIFE, OVERWRITTEN), [math.nan] * of.heads)
        if walked is not None:
            memory = {HALF_LIFE: walked.half_lives(), OVERWRITTEN: walked.overwritten()}
            counts |= dict.fromkeys(memory, count)
        found |= {name: [values[head] for head in heads] for name, values in memory.items()}
        self._rows |= {name: max(many, self._rows.get(name, 0)) for name, many in counts.items()}
        self._reports.append(self._layer(of, found))
        if drawn is not None:
            self._matrices += [
                Matrix(
                    layer=of.number,
                    head=head,
                    kv_head=head // of.group,
                    queries=drawn.queries,
                    keys=drawn.keys,
                    pool=drawn.pool,
                    values=drawn.cells(at),
                    signed=of.signed,
                )
                for at, head in enumerate(heads)
            ]

    def _layer(self, of: LayerMap, found: Mapping[str, Sequence[float]]) -> LayerReport:
        """A layer whose heads' metrics were `found`."""
        each = (dict(zip(found, one, strict=True)) for one in zip(*found.values(), strict=True))
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
                    metrics={name: metrics[name] for name in self.metrics},
                    labels=labels_of(metrics, self._undetermined[of.kind]),
                )
                for head, metrics in zip(self.heads[of.number], each, strict=True)
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
                for kind, undetermined in self._undetermined.items()
                if label.name in undetermined
            )
            if [len(alike) for alike in kinds.values()] == [len(self._undetermined)]:
                yield label.name, next(iter(kinds))
            elif kinds:
                reasons = (f"{', '.join(alike)}: {why}" for why, alike in kinds.items())
                yield label.name, "; ".join(reasons)


def measure_states(passes: Passes, heads: Mapping[int, Sequence[int]]) -> StatesReport:
    """The states of `heads[layer]` while the prompt and the new tokens are read.

    All these layers have a mixer whose state is a matrix (`LayerMap.signed`). The pass is the
    usual one, with a cache; states are walked through once more in float64 from what it emitted,
    and are compared with its cache and its own results. Raises OutOfMemory, and NotFinite for NaN.
    """
    passes.write()
    model, every = passes.model, passes.ids
    passes.require_cache(len(every))
    session = passes.session()
    points = min(POINTS, len(every))
    positions = [-(-len(every) * (at + 1) // points) - 1 for at in range(points)]
    found: list[LayerStates] = []
    states: list[ViewCheck] = []
    results: list[ViewCheck] = []
    formulas: list[ViewCheck] = []

    def settle(of: LayerMap, seen: Seen) -> None:
        formulas.append(formula_checks(model, every, seen, of.checked, rows=FORMULA_ROWS))
        single = {name: tensor[0] for name, tensor in seen.items()}
        walked = walk(of.recurrence(single), positions, results=True)
        eps = torch.finfo(model.stream_dtype).eps
        cached = session.state.tensors()[of.matrix.name][0]
        states.append(walked.check(cached, of.matrix.name))
        if not of.edited:
            results.append(walked.check_results(single[of.mixed], eps, of.mixed))
        states_HPde = torch.stack([walked.states[position] for position in positions], 1)
        found.append(
            LayerStates(
                layer=of.number,
                kind=of.kind,
                rows=states_HPde.shape[2],
                columns=states_HPde.shape[3],
                bytes=cached.nbytes,
                heads=tuple(
                    HeadStates(
                        head=head,
                        norms=tuple(walked.norms_HT[head, positions].tolist()),
                        effective_ranks=tuple(effective_rank(states_HPde[head]).tolist()),
                    )
                    for head in heads[of.number]
                ),
            )
        )

    tap = LayerWatch([LayerMap(model, number) for number in heads], settle)
    passes.at_once(tap, logits="none", until=max(heads), session=session)
    words = "norm, projections, convolution, decays and output follow from their formulas"
    followed = replace(worst(formulas), words=words + some_rows(FORMULA_ROWS, len(every)))
    return StatesReport(
        dtype=dtype_name(model.dtype),
        tokens=model.tokens(every),
        prompt_tokens=passes.prompt_tokens,
        positions=tuple(positions),
        layers=tuple(found),
        checks=(worst(states), *map(worst, filter(None, [results])), followed, *passes.checks),
    )
