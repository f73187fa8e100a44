"""One forward pass, and every layer's attention looked at while it is computed.

Axes: H heads, K key/value heads, T rows, S keys, d size of a query and key, e of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmcli.commands.attention.measure.kept import TopPairs
from llmcli.commands.attention.measure.layer import Layer, OnMatrix, Shared
from llmcli.commands.attention.measure.metrics import undetermined_kinds
from llmcli.commands.attention.report.heads import AttentionReport, LayerReport
from llmcli.commands.attention.report.request import AttentionRequest, unknown_metrics
from llmcli.engine.sampling import Sampling
from llmcli.inspect.attention.block import Tokens
from llmcli.inspect.attention.checks import AttentionChecks
from llmcli.inspect.cache import cache_check
from llmcli.inspect.formulas import formula_checks, some_rows, worst
from llmcli.inspect.kernel import layer_of
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.observe import Observed, observe
from llmcli.model import Model, dtype_name
from llmcli.records.checks import ViewCheck
from llmcli.records.head_metrics import LABELS, METRICS, MOST_RANKED, RANK
from llmcli.records.matrix import Matrix
from llmcli.records.progress import Progress

# of a longer prompt so many rows of what is a product are held against the formulas of `explain`
FORMULA_ROWS = 12

Seen = dict[str, Tensor]
Skipped = tuple[tuple[str, str], ...]  # metrics that are left out, with the reason


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

    The forward pass runs once and is the usual one; nothing `[T, T]` is kept but for `on_matrix`,
    one layer at a time, and `effective_rank`. Raises OutOfMemory, and NotFinite for NaN.
    """
    request = request or AttentionRequest()
    look = _Look(model, ids, request, on_matrix, block_rows, progress)
    return look.report()


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
        return names, ()
    reason = f"it needs whole matrices: up to {MOST_RANKED} tokens, and there are {tokens}"
    return tuple(name for name in names if name != RANK), ((RANK, reason),)


class _Look:
    """Watches the pass, and shows every layer what its attention was computed from."""

    def __init__(
        self,
        model: Model,
        ids: Sequence[int],
        request: AttentionRequest,
        on_matrix: OnMatrix | None,
        block_rows: int | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.request, self.generate = model, request, request.generate
        self._prompt, self._progress = list(ids), progress
        self._most = len(ids) + request.generate
        self._heads = request.chosen(model.config)
        self._maps = {number: LayerMap(model, number) for number in self._heads}
        self._tokens = Tokens(self._prompt, model.device)
        metrics, self._skipped = _possible(request, model, self._most)
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
        # whole matrices exist of one layer at a time: with new tokens once all of these are known
        self._at_the_end = request.generate > 0 and (on_matrix is not None or RANK in metrics)
        self._now: Seen = {}
        self._lent: Seen = {}  # of the call, what layers read of others: keys and values
        self._lenders = {
            name for of in self._maps.values() for name in of.inputs if layer_of(name) != of.number
        }
        self._of_prompt: dict[int, Seen] = {}
        self._of_new: dict[int, list[Seen]] = {number: [] for number in self._maps}
        self._open: dict[int, Layer] = {}
        self._reports: list[LayerReport] = []
        self._matrices: list[Matrix] = []
        self._rows: dict[str, int] = {}
        self._undetermined: dict[str, dict[str, str]] = {}  # kinds of heads, by the kind of layer
        self._caches: list[ViewCheck] = []
        self._states: list[ViewCheck] = []
        self._done = 0
        self._total = self._most * sum(map(len, self._heads.values()))

    def report(self) -> AttentionReport:
        """Runs the pass."""
        model, request, metrics = self.model, self.request, self._shared.metrics
        seen = observe(
            model,
            self._prompt,
            self,
            generate=self.generate,
            sampling=Sampling(temperature=0.0),
            until=max(self._maps) if self.generate < 1 else None,
            progress=self._progress,
        )
        if seen.state is not None:
            self._after(seen, seen.state.tensors())
        return AttentionReport(
            what=request.what,
            dtype=dtype_name(model.dtype),
            tokens=tuple((id, model.token_text(id)) for id in seen.ids),
            prompt_tokens=seen.prompt_tokens,
            metrics=tuple(metric for metric in METRICS if metric.name in metrics),
            rows={name: self._rows[name] for name in metrics if name in self._rows},
            labels=LABELS,
            layers=tuple(self._reports),
            matrices=tuple(self._matrices),
            pairs=self._shared.pairs.pairs(),
            checks=self._checks(len(seen.ids)),
            skipped=self._skipped,
            unlabelled=tuple(self._unlabelled()),
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

    def __call__(self, first: int, name: str, tensor: Tensor) -> None:
        """An activation of the call whose tokens begin at position `first`."""
        number = layer_of(name)
        if name in self._lenders:
            self._lent[name] = tensor
        if number not in self._maps:
            return
        of = self._maps[number]
        if name in of.inputs:
            self._now[name] = tensor
        if name == of.adds:
            lent = {one: self._lent[one] for one in of.inputs & self._lenders}
            seen, self._now = lent | self._now, {}
            if first:
                self._of_new[number].append(seen)
            else:
                self._read_prompt(number, seen)

    def _read_prompt(self, number: int, seen: Seen) -> None:
        of = self._maps[number]
        self._formulas.append(
            formula_checks(self.model, self._prompt, seen, of.checked, rows=FORMULA_ROWS)
        )
        rows = {name: seen[name][0] for name in of.reads}
        if self.generate:
            # copies: a view would keep the whole product of the projection
            kept = {*(of.reads if self._at_the_end else ()), *of.whole, *of.kept}
            self._of_prompt[number] = {name: seen[name][0].clone() for name in kept}
            if self._at_the_end:
                return
        layer = self._layer(of)
        layer.add(0, self._tokens, rows)
        if not self.generate:
            self._finish(layer, len(self._prompt))

    def _layer(self, of: LayerMap) -> Layer:
        layer = self._open[of.number] = Layer(
            self.model, of, self._heads[of.number], self._most, self._shared
        )
        return layer

    def _finish(self, layer: Layer, tokens: int) -> None:
        del self._open[layer.number]
        of = layer.of
        if of.kind not in self._undetermined:
            self._undetermined[of.kind] = undetermined_kinds(
                self._tokens, tokens, of.window, signed=of.signed
            )
        report, matrices, rows = layer.finish(tokens, self._undetermined[of.kind])
        self._reports.append(report)
        self._matrices += matrices
        for name, count in rows.items():
            self._rows[name] = max(count, self._rows.get(name, 0))

    @torch.inference_mode()
    def _after(self, seen: Observed, caches: Mapping[str, Tensor]) -> None:
        """The rows of the new tokens, from the keys and values in the cache."""
        self._tokens = Tokens(list(seen.ids), self.model.device)
        for number, of in self._maps.items():
            new, prompt = _joined(self._of_new.pop(number)), self._of_prompt.pop(number)
            held = of.held(caches, len(seen.ids))
            for state in of.states:
                computed = torch.cat((prompt[state.holds], new[state.holds][0]), -2)
                self._caches.append(cache_check(computed, held[state.holds][0], state.name))
            every = {name: torch.cat((prompt[name], new[name][0]), -2) for name in of.whole}
            whole = every | {name: tensor[0] for name, tensor in held.items()}
            with_cache = new | {name: tensor[None] for name, tensor in whole.items()}
            self._new_formulas(seen, of, new, with_cache)
            rows, first = {name: new[name][0] for name in of.reads}, seen.prompt_tokens
            if self._at_the_end:
                rows = {name: torch.cat((prompt[name], rows[name]), -2) for name in of.reads}
                first = 0
            layer = self._layer(of) if self._at_the_end else self._open[number]
            layer.add(first, self._tokens, rows | whole)
            self._check_fixed(layer, caches, every)
            self._finish(layer, len(seen.ids))

    def _check_fixed(self, layer: Layer, caches: Mapping[str, Tensor], every: Seen) -> None:
        """What a cache has in a fixed size: the last rows of what it holds, and states."""
        for state in layer.of.kept_fixed:
            cached = caches[state.name][0]
            if state.holds in every:
                made = layer.of.remembered(state, every[state.holds])
                self._caches.append(cache_check(made, cached, state.name))
            elif layer.walked is not None:
                self._states.append(layer.walked.check(cached, state.name))

    def _new_formulas(self, seen: Observed, of: LayerMap, new: Seen, with_cache: Seen) -> None:
        """What leads to the cache from the new tokens alone, what reads it with the cache."""
        written = [name for name in of.checked if name in new]
        readers = [name for name in written if of.reads_whole(name)]
        own = [name for name in written if name not in readers]
        for tensors, names in ((new, own), (with_cache, readers)):
            self._formulas.append(
                formula_checks(
                    self.model,
                    seen.ids,
                    tensors,
                    names,
                    rows=FORMULA_ROWS,
                    prompt_tokens=seen.prompt_tokens,
                )
            )

    def _checks(self, tokens: int) -> tuple[ViewCheck, ...]:
        formulas = worst(self._formulas)
        words = "norm, projections, rotation, scores and output follow from their formulas"
        words += some_rows(FORMULA_ROWS, tokens)
        checks = (*self._shared.proof.checks(), replace(formulas, words=words))
        for one in (self._caches, self._states):
            checks += (worst(one),) if one else ()
        return checks

    def _advance(self, rows: int) -> None:
        self._done += rows
        if self._progress is not None:
            self._progress("looking at the heads", self._done, self._total)


def _joined(calls: Sequence[Seen]) -> Seen:
    """The rows of several calls, one after the other."""
    return {name: torch.cat([seen[name] for seen in calls], -2) for name in calls[0]}
