"""Ablations: runs in which the result of one head, feed-forward, expert or layer is another one.

Axes: H heads, K chosen experts, E experts, T tokens, N a width, V vocabulary, n rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import fmean

import torch
from torch import Tensor

from llmcli.commands.ablate.report import AblateReport, By, Effect
from llmcli.config.model import ModelConfig
from llmcli.decoder.decoder import check_edits
from llmcli.engine.session import Session
from llmcli.errors import NotFinite, UsageError
from llmcli.evaluate.rule import exact
from llmcli.graph.block import block_names
from llmcli.graph.edited import parse_edit
from llmcli.graph.graph import graph
from llmcli.graph.names import Names
from llmcli.graph.ops import Project
from llmcli.graph.routing import ExpertProject, SumExperts
from llmcli.inspect.edits import Change, Ids, apply_edits, emitted
from llmcli.inspect.sweep import Sweep
from llmcli.measure.runs import mean_interval
from llmcli.model import Model, dtype_name
from llmcli.nn.step import Edit
from llmcli.records.document import ViewCheck
from llmcli.records.work import Progress, no_progress
from llmcli.shell.answer import Answer
from llmcli.shell.inspection import parse_span

# How far a number may be off, in roundings of the largest logit. Measured, the worst of all small
# models: 6.6 in float64, 2.6 in float32, 2.8 in 16 bits.
ROUNDINGS, NARROW_ROUNDINGS = 16, 5

Rows = dict[tuple[str, int | None], Tensor]  # `[…, n, N]` by activation, and by expert or None


@dataclass(frozen=True, kw_only=True)
class Place:
    """What is ablated at a time: the activations `names`, or one `index` of their first axis.

    Of an expert `chosen` is the activation that says which rows are its own.
    """

    kind: str
    names: tuple[str, ...]
    layer: int | None
    index: int | None = None
    chosen: str = ""

    def key(self, name: str) -> tuple[str, int | None]:
        """Whose rows take the place of its own."""
        return name, self.index if self.chosen else None

    def edits(self, own: Rows, rows: Rows) -> list[Edit]:
        """Puts `rows` there, the first for the first token, and again the first after the last.

        `own`: what the run emits without them.
        """
        return [
            Edit(name=n, fn=partial(self._put, rows[self.key(n)], own.get((self.chosen, None))))
            for n in self.names
        ]

    def _put(self, rows: Tensor, which: Tensor | None, x: Tensor, positions: Tensor) -> Tensor:
        part = x[0]
        if self.chosen:
            assert which is not None
            mask = torch.eq(which, self.index or 0).T
            part[mask] = rows[torch.arange(int(mask.count_nonzero())) % len(rows)]
        else:
            at = ... if self.index is None else self.index
            hidden = torch.isneginf(part[at])  # scores of later tokens
            part[at] = rows[..., positions.flatten() % rows.shape[-2], :][at].masked_fill(
                hidden, -torch.inf
            )
        return x


def places(config: ModelConfig, what: Sequence[str] | None) -> list[Place]:
    """Every head, expert, other addend of the stream and layer; or all of the activations `what`.

    Raises UsageError for activations that cannot be edited.
    """
    if what is not None:
        check_edits(config, what)
        return [place for name in what for place in _inside(config, name)]
    found: list[Place] = []
    for number, layer in enumerate(config.layers):
        parts = block_names(layer, f"blocks.{number}")
        added = [name for part in parts for name in part.residual_updates]
        inner = [name for name in _inner(config) if graph(config)[name].layer == number]
        found += [place for name in (*inner, *added) for place in _inside(config, name)]
        found.append(Place(kind="layer", names=tuple(added), layer=number))
    return found


@lru_cache(maxsize=4)
def _inner(config: ModelConfig) -> dict[str, str]:
    """The results of heads `[H, T, N]` as they enter a product, and of experts `[K, T, D]`.

    Of these with the activation `[T, K]` that says whose they are.
    """
    whole, found = graph(config), dict[str, str]()
    for op in (node.op for node in whole.nodes.values()):
        if isinstance(op, Project) and len(whole[op.source].axes) == 3:
            found[op.source] = ""
        elif isinstance(op, SumExperts) and isinstance(made := whole[op.value].op, ExpertProject):
            found[op.value] = made.chosen
    return found


def _inside(config: ModelConfig, name: str) -> Iterator[Place]:
    """The places in an activation: each index of its first axis, if that is not of tokens."""
    node, chosen = graph(config)[name], _inner(config).get(name)
    kind = "expert" if chosen else "head"
    if chosen is None:
        kind = name.split(".", 2 * (node.layer is not None))[-1].removesuffix("_out")
    sizes = graph(config).sizes(node.layer)
    each = range(sizes["E" if chosen else node.axes[0]]) if len(node.axes) == 3 else [None]
    for index in each:
        yield Place(
            kind=kind, names=(name,), layer=node.layer, index=index, chosen=chosen or ""
        )


def measure_ablation(
    model: Model,
    prompts: Sequence[Ids],
    answer: Answer | None = None,
    *,
    span: str | None = None,
    by: By = "mean",
    what: Sequence[str] | None = None,
    other: Ids | None = None,
    progress: Progress = no_progress,
) -> AblateReport:
    """The effect of each place on the loss, or on the number of an `answer` after the last token.

    `span`: of which tokens the loss is (`25:`, as `--position`), all but the first without it.
    `resample` takes what is in the prompt `other`, or in the one before in `prompts`: token t is
    replaced by its token t, and after its last begins with its first again. An expert is ablated
    where it was chosen, in its own rows one after the other; one that `other` did not choose is 0.
    Raises UsageError where there is no loss, and NotFinite.
    """
    every = places(model.config, what)
    nodes = [graph(model.config)[name] for place in every for name in place.names]
    if by != "zero" and any("S" in node.axes or node.integer for node in nodes):
        raise UsageError(
            f"`--by {by}` fits no activation with a number for each key, nor numbers of experts",
            hint="use `--by zero`",
        )
    mean, read = _means(model, prompts, every) if by == "mean" else {}, _read(every)
    found: list[dict[int, float]] = []
    plains, answers = [], set[int | None]()
    for number, ids in enumerate(prompts):
        apply_edits(model, [ids])
        seen: dict[str, Tensor] = {}  # as this very run computes it, without a cache

        def keep(name: str, x: Tensor, seen: dict[str, Tensor] = seen) -> None:
            if name in read:
                seen[name] = x[0]

        sweep = Sweep(model, ids, logits="last" if answer else "all", tap=keep, progress=progress)
        own = _rows(model, ids, every, seen)
        rows = mean or {key: torch.zeros_like(x[..., :1, :]) for key, x in own.items()}
        if by == "resample":
            rows |= _rows(model, prompts[number - 1] if other is None else other, every)
        known = None if answer is None else answer.known(sweep.plain[0, -1])
        answers.add(None if known is None else known.answer)
        measure = _metric(ids, known, span)
        plain = measure(sweep.plain[0])
        if not math.isfinite(plain):
            raise NotFinite("the logits are not finite", dtype=dtype_name(model.dtype))
        here = [at for at, one in enumerate(every) if all(one.key(n) in own for n in one.names)]
        runs = [every[at].edits(own, rows) for at in here]
        effects = {
            here[run]: measure(row) - plain
            for some, logits in sweep.run(runs)
            for run, row in zip(some, logits, strict=True)
        }
        found.append(effects)
        plains.append(plain)
    strongest = max(effects, key=lambda at: abs(effects[at]))
    place, batch = every[strongest], torch.tensor([ids], device=model.device)
    ((_, same),) = sweep.run([place.edits(own, own)])
    with torch.inference_mode():
        cached = Session(model.decoder, 1, len(ids)).extend([ids], logits="all")
        alone = model.decoder(batch, edits=_requested(model, place, own, rows, len(ids)))
    largest = float(cached.abs().max())
    off, kept = (_rounding(x) * largest for x in (model.dtype, model.decoder.cache_dtype))
    where = f"{place.names[0]}{'' if place.index is None else [place.index]}"
    check = partial(ViewCheck, where=where)
    checks = (
        check(name="same", words="the strongest part, ablated by its own numbers, changes nothing",
              value=abs(measure(same[0]) - plain),  # an edited pattern is not made by a kernel
              tolerance=0.0 if all(map(graph(model.config).written, place.names)) else off),
        check(name="alone", words="its effect is that of `--edit` in a run of its own",
              value=abs(measure(alone[0]) - plain - effects[strongest]), tolerance=off),
        check(name="plain", words="without an ablation the number is that of `score`",
              value=abs(measure(cached[0]) - plain), tolerance=max(off, kept), where=""),
    )  # fmt: skip
    known = known or Answer(answer=None, versus=None)
    shown = known.answer if len(answers) == 1 else None, known.versus
    pair = [None if id is None else model.tokens([id])[0] for id in shown]
    return AblateReport(
        dtype=dtype_name(model.dtype),
        by=by,
        metric="loss" if answer is None else "logit" if answer.versus is None else "difference",
        answer=pair[0],
        versus=pair[1],
        prompts=len(prompts),
        tokens=model.tokens(ids) if len(prompts) == 1 else None,
        value=fmean(plains),
        layers=len(model.config.layers),
        effects=tuple(
            _effect(every[at], [effects.get(at, 0.0) for effects in found])
            for at in sorted({at for effects in found for at in effects})
        ),
        checks=checks,
    )


def _rounding(dtype: torch.dtype) -> float:
    """How far a number may be off, relative to the largest logit."""
    return (NARROW_ROUNDINGS if dtype.itemsize == 2 else ROUNDINGS) * torch.finfo(dtype).eps


def _effect(place: Place, values: Sequence[float]) -> Effect:
    """In the mean of the prompts; an expert that a prompt did not choose has none there."""
    low, high = mean_interval(values) or (None, None)
    name = place.names[0] if place.kind != "layer" else f"blocks.{place.layer}"
    return Effect(kind=place.kind, name=name, layer=place.layer, index=place.index,
                  value=fmean(values), low=low, high=high)  # fmt: skip


def _metric(ids: Ids, answer: Answer | None, span: str | None) -> Callable[[Tensor], float]:
    """The number of logits `[T, V]`: mean −log p of next tokens in `span`, or that of the answer.
    """
    first, end = parse_span(span, len(ids), "--position")
    first = max(first, 1)
    if answer is None and first >= end:
        raise UsageError(
            "nothing comes before the first token that could predict it, so it has no loss",
            hint="give other tokens, or one that may follow with `--answer`",
        )

    def loss(logits_TV: Tensor) -> float:
        logprobs_TV = torch.log_softmax(logits_TV[first - 1 : end - 1], -1)
        next_T = torch.tensor(ids[first:end], device=logits_TV.device)
        return -fmean(logprobs_TV.gather(1, next_T[:, None])[:, 0].tolist())

    return loss if answer is None else lambda logits_TV: float(answer.of(exact(logits_TV[-1])))


def _read(every: Sequence[Place]) -> set[str]:
    """The activations of these places, and which experts are chosen there."""
    return {name for place in every for name in (*place.names, place.chosen) if name}


def _rows(
    model: Model, ids: Ids, every: Sequence[Place], seen: Mapping[str, Tensor] | None = None
) -> Rows:
    """What a run emits at these places: all rows of an activation, and those of each expert.

    `seen`: what is known of it, without a batch axis.
    """
    chosen = {name: place.chosen for place in every for name in place.names}
    seen = seen or {}
    missing = _read(every) - seen.keys()
    seen = {**seen, **(emitted(model, [ids], missing, mean=False) if missing else {})}
    found: Rows = {}
    for name, which in chosen.items():
        if which:
            found[which, None] = expert_TK = seen[which]
            for expert in set(expert_TK.flatten().tolist()):
                found[name, expert] = seen[name][(expert_TK == expert).T]
        else:
            found[name, None] = seen[name]
    return found


def _means(model: Model, prompts: Sequence[Ids], every: Sequence[Place]) -> Rows:
    """Their means over all tokens of the prompts: of an expert, over those that chose it."""
    sums, seen = Rows(), Rows()
    counts: Counter[tuple[str, int | None]] = Counter()
    keys = {one.key(name) for one in every for name in one.names}
    for ids in prompts:
        apply_edits(model, [ids])
        seen |= (now := _rows(model, ids, every))
        for key in keys & now.keys():
            sums[key] = sums.get(key, 0) + exact(now[key]).sum(-2, keepdim=True)
            counts[key] += now[key].shape[-2]
    return {key: (x / counts[key]).to(seen[key]) for key, x in sums.items()}


def _requested(model: Model, place: Place, own: Rows, rows: Rows, tokens: int) -> list[Edit]:
    """The place's edits, made from their names as `--edit` is; of an expert its own."""
    if place.chosen:
        return place.edits(own, rows)
    found = []
    for name in place.names:
        index = "" if place.index is None else f"[{place.index}]"
        request = parse_edit(f"{name}{index}", Names(model.config), what="zero")
        value = rows[name, None]
        value = value[..., torch.arange(tokens) % value.shape[-2], :]
        change = Change(replace(request, verb="from"), name, request.places[name], value, 0,
                        {request.text: False})  # fmt: skip
        found.append(Edit(name=name, fn=change))
    return found
