"""One forward pass, which measures the attention of each layer while it is computed.

Axes: H heads, K key/value heads, T rows, S keys, d size of a query and key, e of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llmcli.commands.attention.measure.kept import TopPairs
from llmcli.commands.attention.measure.layer import Layer, OnMatrix, Shared
from llmcli.commands.attention.measure.layers import LayerWatch, Seen
from llmcli.commands.attention.measure.metrics import undetermined_kinds
from llmcli.commands.attention.report.heads import AttentionReport, LayerReport
from llmcli.commands.attention.report.request import AttentionRequest, unknown_metrics
from llmcli.inspect.attention.block import Tokens
from llmcli.inspect.attention.checks import AttentionChecks
from llmcli.inspect.formulas import formula_checks, some_rows, worst
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.passes import Passes
from llmcli.model import Model, dtype_name
from llmcli.records.checks import ViewCheck
from llmcli.records.head_metrics import LABELS, METRICS, MOST_RANKED, RANK
from llmcli.records.matrix import Matrix
from llmcli.records.progress import Progress

# of a longer prompt so many rows of what is a product are held against the formulas of `explain`
FORMULA_ROWS = 12

Skipped = dict[str, str]  # metrics that are left out, with the reason


def measure_attention(
    model: Model,
    ids: Sequence[int],
    request: AttentionRequest | None = None,
    *,
    on_matrix: OnMatrix | None = None,
    block_rows: int | None = None,
    progress: Progress | None = None,
) -> AttentionReport:
    """What the requested heads of `ids`, and of up to `generate` tokens after them, attend to.

    Metrics that no head of the model has are left out. `on_matrix(layer, [H, T, S])` is given
    weights, or scores (-∞ where masked), float32 (float64 where the model is), of the heads
    requested, layer by layer in order. `block_rows`: so many rows at a time (default: by memory);
    numbers depend on it by rounding.

    New tokens are generated first; then one usual forward pass reads all tokens. Nothing `[T, T]`
    is kept but for `on_matrix`, one layer at a time, and `effective_rank`. Raises OutOfMemory, and
    NotFinite for NaN.
    """
    request = request or AttentionRequest()
    passes = Passes(model, ids, request.generate, progress)
    passes.write()
    look = _Look(model, passes.ids, request, on_matrix, block_rows, progress)
    tap = LayerWatch(look.maps, look.settle)
    passes.at_once(tap, logits="last", until=max(look.maps))
    return look.report(len(ids), passes.checks)


def _possible(
    request: AttentionRequest, model: Model, tokens: int
) -> tuple[tuple[str, ...], Skipped]:
    """The metrics that are computed, in their own order, and those that are left out."""
    unknown = unknown_metrics(model.config)
    names = tuple(
        metric.name for metric in METRICS
        if metric.name in request.metrics and metric.name not in unknown
    )  # fmt: skip
    if RANK not in names or tokens <= MOST_RANKED:
        return names, {}
    reason = f"it needs whole matrices: up to {MOST_RANKED} tokens, and there are {tokens}"
    return tuple(name for name in names if name != RANK), {RANK: reason}


class _Look:
    """What is found in one pass, layer by layer."""

    def __init__(
        self,
        model: Model,
        ids: tuple[int, ...],
        request: AttentionRequest,
        on_matrix: OnMatrix | None,
        block_rows: int | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.request, self._ids, self._progress = model, request, ids, progress
        self._heads = request.chosen(model.config)
        self.maps = {number: LayerMap(model, number) for number in self._heads}
        self._tokens = Tokens(list(ids), model.device)
        metrics, self._skipped = _possible(request, model, len(ids))
        self._shared = Shared(
            request=request,
            metrics=metrics,
            on_matrix=on_matrix,
            block_rows=block_rows,
            proof=AttentionChecks(model.dtype, model.device),
            pairs=TopPairs(request, model.config.bos),
            advance=self._advance,
        )
        self._formulas: list[ViewCheck] = []
        self._reports: list[LayerReport] = []
        self._matrices: list[Matrix] = []
        self._rows: dict[str, int] = {}
        self._undetermined: dict[str, dict[str, str]] = {}  # kinds of heads, by the kind of layer
        self._done, self._total = 0, len(ids) * sum(map(len, self._heads.values()))

    def report(self, prompt_tokens: int, steps: tuple[ViewCheck, ...]) -> AttentionReport:
        """What was seen; the first `prompt_tokens` were given, others proven by `steps`."""
        request, metrics = self.request, self._shared.metrics
        return AttentionReport(
            what=request.what,
            dtype=dtype_name(self.model.dtype),
            tokens=self.model.tokens(self._ids),
            prompt_tokens=prompt_tokens,
            metrics=tuple(metric for metric in METRICS if metric.name in metrics),
            rows={name: self._rows[name] for name in metrics if name in self._rows},
            labels=LABELS,
            layers=tuple(self._reports),
            matrices=tuple(self._matrices),
            pairs=self._shared.pairs.pairs(),
            checks=(*self._checks(), *steps),
            skipped=self._skipped,
            unlabelled=dict(self._unlabelled()),
        )

    def _unlabelled(self) -> Iterator[tuple[str, str]]:
        """The kinds that are undetermined, with the reason in every kind of layer."""
        for label in LABELS:
            kinds: dict[str, list[str]] = {}
            for kind, undetermined in self._undetermined.items():
                if label.name in undetermined:
                    kinds.setdefault(undetermined[label.name], []).append(kind)
            if [len(alike) for alike in kinds.values()] == [len(self._undetermined)]:
                yield label.name, next(iter(kinds))
            elif kinds:
                reasons = (f"{', '.join(alike)}: {why}" for why, alike in kinds.items())
                yield label.name, "; ".join(reasons)

    def settle(self, of: LayerMap, seen: Seen) -> None:
        """All rows of a layer."""
        self._formulas.append(
            formula_checks(self.model, self._ids, seen, of.checked, rows=FORMULA_ROWS)
        )
        if of.kind not in self._undetermined:
            self._undetermined[of.kind] = undetermined_kinds(
                self._tokens, len(self._ids), of.window, signed=of.signed
            )
        layer = Layer(self.model, of, self._heads[of.number], len(self._ids), self._shared)
        rows = {name: seen[name][0] for name in of.reads}
        report, matrices, counts = layer.read(self._tokens, rows, self._undetermined[of.kind])
        self._reports.append(report)
        self._matrices += matrices
        for name, count in counts.items():
            self._rows[name] = max(count, self._rows.get(name, 0))

    def _checks(self) -> tuple[ViewCheck, ...]:
        words = "norm, projections, rotation, scores and output follow from their formulas"
        words += some_rows(FORMULA_ROWS, len(self._ids))
        return (*self._shared.proof.checks(), replace(worst(self._formulas), words=words))

    def _advance(self, rows: int) -> None:
        self._done += rows
        if self._progress is not None:
            self._progress("looking at the heads", self._done, self._total)
