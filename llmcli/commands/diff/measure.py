"""Two models side by side: their predictions, residual streams, activations and parameters.

Letters: T tokens of one forward call, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcli.commands.diff.report import (
    Alignment,
    DiffReport,
    Divergence,
    NodeDiff,
    ParameterDiff,
    StreamDiff,
    TokenDiff,
)
from llmcli.devices import float64_device
from llmcli.errors import UsageError
from llmcli.evaluate.rule import symbol
from llmcli.graph.graph import graph
from llmcli.graph.precision import EPS
from llmcli.inspect.edits import apply_edits
from llmcli.inspect.formulas import compared, formula_checks, formula_inputs, kernels, worst
from llmcli.inspect.kernel import edited, layer_of, rules
from llmcli.inspect.passes import Passes
from llmcli.inspect.windows import CHUNK, Reader, chosen, predictions, reader
from llmcli.model import Model
from llmcli.records.document import ViewCheck
from llmcli.records.numbers import counted
from llmcli.records.text import TextScore, Token
from llmcli.records.work import Progress, no_progress

AT_ONCE = 32  # rows of logits in float64
SAMPLE = 64  # tokens that A reads twice
ROWS, CHECKED_ROWS = 64, 4  # of products: where A and B are compared, and where B is checked
NEGATIVE = 1e-9  # nats that a divergence of equal predictions may be below 0, by its sum's rounding


@dataclass(frozen=True, kw_only=True)
class Side:
    """A model and its tokens, with their texts and their bytes (start, end).

    `read`: how it reads texts, if not as the model does; then `model` has its tokens alone.
    """

    model: Model
    ids: Sequence[int]
    texts: Sequence[str]
    spans: Sequence[tuple[int, int]]
    read: Reader | None = None

    @property
    def reader(self) -> Reader:
        """What reads the text now: the model's edits are of this one."""
        if self.read is None:
            apply_edits(self.model, [self.ids])
        return self.read or reader(self.model)


def measure_diff(
    a: Side,
    b: Side,
    *,
    window: int,
    stride: int,
    aligned: bool = False,
    progress: Progress = no_progress,
) -> DiffReport:
    """B beside A, without what B is (`b` and `how`).

    Where both have the same ids they read them chunk by chunk side by side, in windows as
    `predictions` does. `aligned`: their texts are two prompts of at most `CHUNK` tokens. Else only
    their scores are compared. Raises NotFinite.
    """
    same, alignment = list(a.ids) == list(b.ids), None
    tokens: list[TokenDiff] = []
    if same:
        both = predictions([a.reader, b.reader], a.ids, window, stride, beyond=True)
        for position, logits in both:
            pairs = [(at, at) for at in range(position, position + len(logits[0]))]
            tokens += _tokens(a, b, pairs, *logits)
            progress("reading", position, len(a.ids))
        logprobs = [[getattr(one, side) for one in tokens] for side in "ab"]
        score_a, score_b = (
            TextScore.of([None, *found[: len(a.ids) - 1]], side.spans)
            for found, side in zip(logprobs, (a, b), strict=True)
        )
    else:
        score_a, score_b = (_score(side, window, stride) for side in (a, b))
    places = [(at, at) for at in range(min(len(a.ids), CHUNK))] if same else []
    if aligned:
        alignment, places = align(a.ids, b.ids)
        if not places:
            raise UsageError(
                "the two prompts neither begin nor end with the same token",
                hint="give prompts of the same length, or with a common beginning or end",
            )
        of_a, of_b = (side.reader(len(side.ids))(side.ids, True) for side in (a, b))
        rows_a, rows_b = (list(at) for at in zip(*places, strict=True))
        assert of_a is not None
        assert of_b is not None
        after = [(i + 1, j + 1) for i, j in places]
        tokens += _tokens(a, b, after, of_a[rows_a], of_b[rows_b])
    report = DiffReport(
        b={},
        how="",
        score_a=score_a,
        score_b=score_b,
        same_tokens=same,
        largest_difference=max(
            (0.0 if one.a == one.b else abs(one.b - one.a)
             for one in tokens if one.a is not None and one.b is not None), default=None,
        ),
        divergence=divergence(tokens) if tokens else None,
        alignment=alignment,
        tokens=tuple(tokens),
        checks=(_itself(a), _not_negative(tokens)) if tokens else (_itself(a),),
    )
    if not places or b.read is not None or not comparable(a.model, b.model):
        return report
    streams, nodes, check = _activations(
        a.model, b.model, a.ids[:CHUNK], b.ids[:CHUNK], places, progress
    )
    return replace(
        report, activations=len(places), streams=streams, nodes=nodes,
        checks=(*report.checks, check),
    )  # fmt: skip


# predictions


def _score(side: Side, window: int, stride: int) -> TextScore:
    logprobs: list[float | None] = [None] * min(len(side.ids), 1)
    for position, (logits_TV,) in predictions([side.reader], side.ids, window, stride):
        next_ids = side.ids[position : position + len(logits_TV)]
        logs_TV = torch.log_softmax(logits_TV, -1)
        logprobs += chosen(logs_TV, next_ids, position, side.model.dtype)[0]
    return TextScore.of(logprobs, side.spans)


def _tokens(
    a: Side, b: Side, places: Sequence[tuple[int, int]], a_TV: Tensor, b_TV: Tensor
) -> Iterator[TokenDiff]:
    """Of predictions for the tokens at these places of A's and B's text, by their logits.

    The vocabulary is what both have: an embedding may be padded beyond it.
    """
    vocabulary = min(a_TV.shape[1], b_TV.shape[1])
    token = _token_of(a.model)
    for first in range(0, len(places), AT_ONCE):
        some = places[first : first + AT_ONCE]
        next_ids = [
            a.ids[i] if i < len(a.ids) and j < len(b.ids) and a.ids[i] == b.ids[j] else None
            for i, j in some
        ]
        logs = []
        for logits_TV in (a_TV, b_TV):
            part = logits_TV[first : first + AT_ONCE, :vocabulary]
            logs.append(part.to(float64_device(part.device), torch.float64).log_softmax(-1))
        logs[1] = logs[1].to(logs[0].device)
        tops = [log.argmax(-1).tolist() for log in logs]
        at, dtypes = some[0][0], (a.model.dtype, b.model.dtype)
        at, dtypes = some[0][0], (a.model.dtype, b.model.dtype)
        known = [0 if id is None else id for id in next_ids]
        (a_T, rank_a), (b_T, rank_b), (_, b_in_a), (_, a_in_b) = (
            chosen(logs[side], which, at, dtypes[side])
            for side, which in ((0, known), (1, known), (0, tops[1]), (1, tops[0]))
        )
        kl, reverse = divergences(*logs).tolist(), divergences(*reversed(logs)).tolist()
        for row, ((i, _), id) in enumerate(zip(some, next_ids, strict=True)):
            yield TokenDiff(
                position=i,
                id=id,
                text="" if id is None else a.texts[i],
                a=None if id is None else a_T[row],
                b=None if id is None else b_T[row],
                rank_a=None if id is None else rank_a[row],
                rank_b=None if id is None else rank_b[row],
                kl=kl[row],
                reverse_kl=reverse[row],
                top_a=token(tops[0][row]),
                top_b=token(tops[1][row]),
                top_a_in_b=a_in_b[row],
                top_b_in_a=b_in_a[row],
            )


def _token_of(model: Model) -> Callable[[int], Token]:
    return cache(lambda id: Token(id=id, text=model.token_text(id)))


def divergences(a_TV: Tensor, b_TV: Tensor) -> Tensor:
    """KL(A ‖ B) `[T]` of log-probabilities; what A finds impossible does not count."""
    terms_TV = a_TV.exp() * (a_TV - b_TV)
    return terms_TV.where(a_TV > -math.inf, torch.zeros_like(terms_TV)).sum(-1)


def divergence(tokens: Sequence[TokenDiff]) -> Divergence:
    """Of all predictions."""
    kl, reverse = (np.array([getattr(one, of) for one in tokens]) for of in ("kl", "reverse_kl"))
    count, z = len(tokens), 1.96
    same = sum(one.top_a.id == one.top_b.id for one in tokens) / count
    off = z * float(kl.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    centre = (same + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(same * (1 - same) / count + (z / (2 * count)) ** 2) / (1 + z * z / count)
    quantiles = np.quantile(kl, (0.5, 0.9, 0.99, 0.999, 1.0)).tolist()
    return Divergence(
        predictions=count,
        mean=float(kl.mean()),
        mean_low=max(0.0, float(kl.mean()) - off),
        mean_high=float(kl.mean()) + off,
        **dict(zip(("median", "p90", "p99", "p999", "max"), quantiles, strict=True)),
        reverse_mean=float(reverse.mean()),
        reverse_max=float(reverse.max()),
        same_top=same,
        same_top_low=centre - half,
        same_top_high=min(1.0, centre + half),
    )


def align(a: Sequence[int], b: Sequence[int]) -> tuple[Alignment, list[tuple[int, int]]]:
    """Pairs of positions of two prompts: all of equally long ones, else beginning and end."""
    least = min(len(a), len(b))
    if len(a) == len(b):
        pairs = [(at, at) for at in range(least)]
        return Alignment(beginning=least, end=0, between_a=0, between_b=0), pairs
    first = next((at for at in range(least) if a[at] != b[at]), least)
    last = next((n for n in range(least - first) if a[-1 - n] != b[-1 - n]), least - first)
    found = Alignment(
        beginning=first, end=last, between_a=len(a) - first - last, between_b=len(b) - first - last
    )
    ends = [(len(a) - n, len(b) - n) for n in range(last, 0, -1)]
    return found, [(at, at) for at in range(first)] + ends


def _itself(a: Side) -> ViewCheck:
    """A's first tokens, read twice: nothing may differ."""
    ids = a.ids[:SAMPLE]
    value, where = 0.0, ""
    for position, both in predictions([a.reader] * 2, ids, len(ids), 1, beyond=True):
        places = [(at, at) for at in range(position, position + len(both[0]))]
        for one in _tokens(a, a, places, *both):
            off = max(abs(one.kl), abs(one.reverse_kl), one.top_a_in_b - 1.0, one.top_b_in_a - 1.0)
            if not off <= value:
                value, where = off, f"position {one.position}"
    words = f"A read twice is A: {counted(len(ids), 'token')}"
    return ViewCheck(name="itself", words=words, value=value, tolerance=0.0, where=where)


def _not_negative(tokens: Sequence[TokenDiff]) -> ViewCheck:
    lowest = min(tokens, key=lambda one: min(one.kl, one.reverse_kl))
    return ViewCheck(
        name="divergence",
        words=f"no divergence is negative: {2 * len(tokens):,} of them",
        value=max(0.0, -min(lowest.kl, lowest.reverse_kl)),
        tolerance=NEGATIVE,
        where=f"position {lowest.position}",
    )


# activations


def comparable(a: Model, b: Model) -> bool:
    """Whether they have the same activations and parameters, of the same sizes."""
    first, second = (
        (
            [(node.name, node.axes) for node in graph(one.config).nodes.values()],
            [graph(one.config).sizes(layer) for layer in (None, *range(len(one.config.layers)))],
            {name: one.decoder.weight(name).shape for name in one.decoder.weight_names},
        )
        for one in (a, b)
    )
    return first == second


def _activations(
    a: Model,
    b: Model,
    ids_a: Sequence[int],
    ids_b: Sequence[int],
    places: Sequence[tuple[int, int]],
    progress: Progress,
) -> tuple[tuple[StreamDiff, ...], tuple[NodeDiff, ...], ViewCheck]:
    """A's residual stream is kept, and of B's activations those that later ones are made of."""
    stream: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        if name.rpartition(".")[2].startswith("resid_"):
            stream[name] = tensor[0]

    Passes(a, ids_a).at_once(keep, logits="none", until=len(a.config.layers) - 1)
    streams: list[StreamDiff] = []
    rows_a, rows_b = (list(at) for at in zip(*places, strict=True))
    nodes = _Nodes(a, b, ids_b, progress)

    def watch(name: str, tensor: Tensor) -> None:
        if name in stream:
            streams.append(_stream(name, rows_a, stream.pop(name)[rows_a], tensor[0][rows_b]))
        nodes.watch(name, tensor)

    Passes(b, ids_b).at_once(watch, logits="all", until=None)
    nodes.settle()
    return tuple(streams), tuple(nodes.found), worst(nodes.checks)


def _stream(name: str, positions: Sequence[int], a_TD: Tensor, b_TD: Tensor) -> StreamDiff:
    device = float64_device(a_TD.device)
    a_TD, b_TD = a_TD.to(device, torch.float64), b_TD.to(device, torch.float64)
    off_T, size_T = (b_TD - a_TD).norm(dim=-1), a_TD.norm(dim=-1)
    errors_T = torch.where(off_T == 0, 0.0, off_T / size_T)
    at, layer = int(errors_T.argmax()), layer_of(name)
    assert layer is not None
    cosines_T = torch.where(off_T == 0, 1.0, torch.cosine_similarity(a_TD, b_TD, dim=-1))
    return StreamDiff(
        name=name,
        layer=layer,
        error=_ratio(float(off_T.norm()), float(size_T.norm())),
        cosine=float(cosines_T.mean()),
        worst=float(errors_T[at]),
        worst_at=positions[at],
        errors=errors_T.float().cpu().numpy(),
    )


def _ratio(off: float, size: float) -> float:
    return off / size if off and size else math.inf if off else 0.0


class _Nodes:
    """B's activations as they come: each beside A's formula of B's own inputs, layer by layer."""

    def __init__(self, a: Model, b: Model, ids: Sequence[int], progress: Progress) -> None:
        self._a, self._b, self._ids, self._progress = a, b, ids, progress
        model = graph(b.config)
        self._inputs = {
            name: formula_inputs(a.config, [name]) | formula_inputs(b.config, [name])
            for name in model.nodes
            if model.written(name) or name in edited(b)
        }
        nodes = [model.nodes[name] for name in self._inputs]
        ops = {node.name: node.op for node in nodes}  # each once, where it has two names
        self._names = [one.name for one in nodes if ops.get(one.shares or "") != one.op]
        self._emitted: dict[str, Tensor] = {}
        self.found: list[NodeDiff] = []
        self.checks: list[ViewCheck] = []

    def watch(self, name: str, tensor: Tensor) -> None:
        """An activation of B. Raises NotFinite."""
        layer = layer_of(name)
        if self._emitted and layer is not None and layer not in map(layer_of, self._emitted):
            self.settle()
        if name in self._inputs:
            self._emitted[name] = tensor

    def settle(self) -> None:
        """Compares what was emitted so far, and keeps what later activations are made of."""
        ready = [name for name in self._names if name in self._emitted]
        if not ready:
            return
        self._progress("comparing activations", len(self.found), len(self._inputs))
        self.checks.append(
            formula_checks(self._b, self._ids, self._emitted, ready, rows=CHECKED_ROWS)
        )
        self.found += [self._node(name) for name in ready]
        self._names = [name for name in self._names if name not in ready]
        needed = {one for name in self._names for one in self._inputs[name]}
        self._emitted = {name: x for name, x in self._emitted.items() if name in needed}

    def _node(self, name: str) -> NodeDiff:
        a, b = self._a, self._b
        known, emitted = rules(a.config), {one: x[0] for one, x in self._emitted.items()}
        names = _parameters(a, name)
        formats = {(a.decoder.weight(n).format, b.decoder.weight(n).format) for n in names}
        unequal = [pair for pair in formats if pair[0] != pair[1]]
        rounded = max((EPS.get(one, math.inf) for pair in unequal for one in pair), default=0.0) / 2
        share, where, off, size = None, "", 0.0, 0.0
        each = known, self._ids, emitted, name, ROWS, len(self._ids)
        if rounded < math.inf:
            share = 0.0
            for own in kernels(b, *each, weights=a):
                ours, theirs, allowed = compared(own, name, rounded)
                shares = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / allowed)
                shares = shares.nan_to_num(math.inf, math.inf)
                at = tuple(int(i) for i in np.unravel_index(int(shares.argmax()), shares.shape))
                if float(shares[at]) >= share:
                    *front, row, column = at
                    share = float(shares[at])
                    where = symbol(name, *front, own.positions[row], column)
        for own in kernels(a, *each):  # in A's arithmetic, which may be another one
            ours, theirs = known[name].tensor(own), own.kernel(name)
            off += float((ours - theirs).where(ours != theirs, ours.new_zeros(())).square().sum())
            size += float(ours.square().sum())
        node = NodeDiff(
            name=name, error=_ratio(math.sqrt(off), math.sqrt(size)), share=share, where=where
        )
        if not node.differs:
            return node
        found = [compare_parameter(a, b, one) for one in names]
        formula = _formula(graph(a.config).nodes[name].op, graph(b.config).nodes[name].op)
        return replace(
            node, parameters=tuple(one for one in found if one.error), formula=tuple(formula)
        )


def _parameters(model: Model, name: str) -> list[str]:
    """The parameters in the formula of an activation, and of what is derived on the way to it."""
    nodes = graph(model.config)
    op = nodes.nodes[name].op
    found: dict[str, None] = {}
    for one in fields(op):
        value = getattr(op, one.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str) and item in _held(model):
                found[item] = None
    for source in op.inputs:
        if not nodes.written(source):
            found |= dict.fromkeys(_parameters(model, source))
    return list(found)


def _formula(a: Any, b: Any, of: str = "") -> Iterator[str]:
    """What differs of two operations, value by value: `eps 1e-06 → 1e-05`."""
    if type(a) is not type(b) or not is_dataclass(a):
        yield f"{of} {a} → {b}"
        return
    for one in fields(a):
        before, after = getattr(a, one.name), getattr(b, one.name)
        if before != after:
            yield from _formula(before, after, one.name)


# parameters


def _held(model: Model) -> set[str]:
    return {*model.decoder.weight_names, "head.W"}


def compare_parameter(a: Model, b: Model, name: str) -> ParameterDiff:
    """A parameter of both, in float64 a part at a time."""
    first, second = (
        one.decoder.weight(name) if name in _held(one) else None for one in (a, b)
    )
    formats = [None if one is None else one.format for one in (first, second)]
    there = first or second
    assert there is not None
    rows = there.shape[0] if there.shape else 1
    error, differing, first_row = None, 0, None
    if first is not None and second is not None and first.shape == second.shape:
        off = size = 0.0
        step = max(1, (1 << 22) // max(1, math.prod(first.shape[1:])))
        for begin in range(0, rows, step):
            x, y = (
                one.dense(rows=slice(begin, begin + step)).to("cpu", torch.float64)
                for one in (first, second)
            )
            changed = (x != y).reshape(len(x), -1).any(1)
            differing += int(changed.sum())
            if first_row is None and bool(changed.any()):
                first_row = begin + int(changed.nonzero()[0])
            off += float((y - x).square().sum())
            size += float(x.square().sum())
        error = _ratio(math.sqrt(off), math.sqrt(size))
    return ParameterDiff(
        name=name, format_a=formats[0], format_b=formats[1], error=error, rows=rows,
        differing_rows=differing, first_row=first_row,
    )  # fmt: skip


def measure_weights(a: Model, b: Model, progress: Progress = no_progress) -> DiffReport:
    """Every parameter of both, in execution order, without what B is."""
    names = list(dict.fromkeys([*graph(a.config).parameters, *graph(b.config).parameters]))
    found = []
    for done, name in enumerate(names):
        progress("comparing weights", done, len(names))
        found.append(compare_parameter(a, b, name))
    sample = compare_parameter(a, a, names[0])
    check = ViewCheck(
        name="itself",
        words=f"A beside A is equal: {names[0]}",
        value=math.inf if sample.error is None else sample.error + sample.differing_rows,
        tolerance=0.0,
    )
    return DiffReport(b={}, how="", parameters=tuple(found), checks=(check,))
