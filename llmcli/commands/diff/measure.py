"""Two models side by side: their predictions, residual streams, activations and parameters.

Letters: T tokens of one forward call, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
NORMAL = 1.96  # standard deviations of a 95 % interval
Places = Sequence[tuple[int, int]]  # positions of A's text and of B's


@dataclass(frozen=True, kw_only=True)
class Side:
    """A model and its tokens, with their bytes (start, end).

    `read`: how texts are read, if not by the model, which then only has the tokens.
    """

    model: Model
    ids: Sequence[int]
    spans: Sequence[tuple[int, int]]
    read: Reader | None = None

    def ready(self) -> Reader:
        """What reads the text next: the model's edits are from now on those of this text."""
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
    """B beside A, without what B is.

    Where both have the same ids they read them chunk by chunk side by side, in windows as
    `predictions` does. `aligned`: their texts are two prompts of at most `CHUNK` tokens. Else only
    their scores are compared. Raises NotFinite, and UsageError where nothing is aligned.
    """
    tokens: list[TokenDiff] = []
    same, alignment, places = list(a.ids) == list(b.ids), None, _at(0, min(len(a.ids), CHUNK))
    if aligned:
        alignment, places = align(a.ids, b.ids)
        of_a, of_b = (side.ready()(len(side.ids))(side.ids) for side in (a, b))
        rows_a, rows_b = (list(at) for at in zip(*places, strict=True))
        tokens += _tokens(a, b, [(i + 1, j + 1) for i, j in places], of_a[rows_a], of_b[rows_b])
    elif same:
        both = predictions([a.ready(), b.ready()], a.ids, window, stride, beyond=True)
        for position, logits in both:
            tokens += _tokens(a, b, _at(position, len(logits[0])), *logits)
            progress("reading", position, len(a.ids))
    if same:
        score_a, score_b = (
            TextScore.of([None, *logprobs][: len(a.ids)], side.spans)
            for side, logprobs in ((a, [one.a for one in tokens]), (b, [one.b for one in tokens]))
        )
    else:
        score_a, score_b = (_score(side, window, stride) for side in (a, b))
    off = [0.0 if one.a == one.b else abs(one.a - one.b)
           for one in tokens if one.a is not None and one.b is not None]  # fmt: skip
    report = DiffReport(
        score_a=score_a, score_b=score_b, same_tokens=same, tokens=tuple(tokens),
        largest_difference=max(off, default=None), alignment=alignment,
        divergence=divergence(tokens) if tokens else None,
        checks=(_itself(a), *([_not_negative(tokens)] if tokens else ())),
    )  # fmt: skip
    if not tokens or b.read is not None or not comparable(a.model, b.model):
        return report
    activations = _Activations(a.model, b.model, b.ids[:CHUNK], places, progress)
    return activations.added(report, a.ids[:CHUNK])


def _at(first: int, count: int) -> Places:
    return [(at, at) for at in range(first, first + count)]


def align(a: Sequence[int], b: Sequence[int]) -> tuple[Alignment, Places]:
    """All positions of two equally long prompts, else those of a common beginning and end.

    Raises UsageError where these have neither.
    """
    first = least = min(len(a), len(b))
    if len(a) != len(b):
        first = next((at for at in range(least) if a[at] != b[at]), least)
    last = next((n for n in range(least - first) if a[-1 - n] != b[-1 - n]), least - first)
    if not first + last:
        raise UsageError(
            "the two prompts neither begin nor end with the same token",
            hint="give prompts of the same length, or with a common beginning or end",
        )
    ends = [(len(a) - n, len(b) - n) for n in range(last, 0, -1)]
    return Alignment(beginning=first, end=last), [*_at(0, first), *ends]


# predictions


def _score(side: Side, window: int, stride: int) -> TextScore:
    logprobs: list[float | None] = [None]
    for position, (logits_TV,) in predictions([side.ready()], side.ids, window, stride):
        ids = side.ids[position : position + len(logits_TV)]
        logprobs += chosen(logits_TV.log_softmax(-1), ids, position, side.model.dtype)[0]
    return TextScore.of(logprobs, side.spans)


def _tokens(a: Side, b: Side, places: Places, a_TV: Tensor, b_TV: Tensor) -> Iterator[TokenDiff]:
    """Of predictions for the tokens at these places, by their logits.

    The vocabulary is what both have: an embedding may be padded beyond it.
    """
    vocabulary = min(a_TV.shape[1], b_TV.shape[1])
    token = cache(lambda id: Token(id=id, text=a.model.token_text(id)))
    device = float64_device(a_TV.device)
    for first in range(0, len(places), AT_ONCE):
        some = places[first : first + AT_ONCE]
        logs = [
            one[first : first + AT_ONCE, :vocabulary].to(device, torch.float64).log_softmax(-1)
            for one in (a_TV, b_TV)
        ]
        tops = [log.argmax(-1).tolist() for log in logs]
        next_ids = [
            a.ids[i] if i < len(a.ids) and j < len(b.ids) and a.ids[i] == b.ids[j] else None
            for i, j in some
        ]
        known = [id or 0 for id in next_ids]
        (a_T, rank_a), (b_T, rank_b), (_, b_in_a), (_, a_in_b) = (
            chosen(logs[side], ids, some[0][0], (a, b)[side].model.dtype)
            for side, ids in ((0, known), (1, known), (0, tops[1]), (1, tops[0]))
        )
        kl, reverse = divergences(*logs).tolist(), divergences(*reversed(logs)).tolist()
        for at, id in enumerate(next_ids):
            own: dict[str, Any] = dict.fromkeys(("a", "b", "rank_a", "rank_b"))
            if id is not None:
                own = {"a": a_T[at], "b": b_T[at], "rank_a": rank_a[at], "rank_b": rank_b[at]}
            yield TokenDiff(
                position=some[at][0], id=id, text="" if id is None else token(id).text, **own,
                kl=kl[at], reverse_kl=reverse[at], top_a=token(tops[0][at]),
                top_b=token(tops[1][at]), top_a_in_b=a_in_b[at], top_b_in_a=b_in_a[at],
            )  # fmt: skip


def divergences(a_TV: Tensor, b_TV: Tensor) -> Tensor:
    """KL(A ‖ B) `[T]` of log-probabilities; what A finds impossible does not count."""
    terms_TV = a_TV.exp() * (a_TV - b_TV)
    return terms_TV.where(a_TV > -math.inf, torch.zeros_like(terms_TV)).sum(-1)


def divergence(tokens: Sequence[TokenDiff]) -> Divergence:
    """Of all predictions."""
    kl, reverse = (np.array([getattr(one, of) for one in tokens]) for of in ("kl", "reverse_kl"))
    count, mean = len(tokens), float(kl.mean())
    off = NORMAL * float(kl.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    same = sum(one.top_a.id == one.top_b.id for one in tokens) / count
    part = NORMAL**2 / count
    half = NORMAL * math.sqrt(same * (1 - same) / count + part / 4 / count)
    median, p90, p99, p999, most = np.quantile(kl, (0.5, 0.9, 0.99, 0.999, 1.0)).tolist()
    return Divergence(
        predictions=count, mean=mean, mean_low=max(0.0, mean - off), mean_high=mean + off,
        median=median, p90=p90, p99=p99, p999=p999, max=most, reverse_mean=float(reverse.mean()),
        reverse_max=float(reverse.max()), same_top=same,
        same_top_low=(same + part / 2 - half) / (1 + part),
        same_top_high=min(1.0, (same + part / 2 + half) / (1 + part)),
    )  # fmt: skip


def _itself(a: Side) -> ViewCheck:
    """A's first tokens, read twice: nothing may differ."""
    ids, off = a.ids[:SAMPLE], {}
    for position, both in predictions([a.ready()] * 2, ids, len(ids) + 1, 1, beyond=True):
        for one in _tokens(a, a, _at(position, len(both[0])), *both):
            ranks = one.top_a_in_b + one.top_b_in_a - 2.0
            off[one.position] = max(abs(one.kl), abs(one.reverse_kl), ranks)
    at = max(off, key=off.__getitem__)
    words = f"A read twice is A: {counted(len(ids), 'token')}"
    where = f"position {at}"
    return ViewCheck(name="itself", words=words, value=off[at], tolerance=0.0, where=where)


def _not_negative(tokens: Sequence[TokenDiff]) -> ViewCheck:
    lowest = min(tokens, key=lambda one: min(one.kl, one.reverse_kl))
    return ViewCheck(
        name="divergence", words=f"no divergence is negative: {2 * len(tokens):,} of them",
        value=max(0.0, -min(lowest.kl, lowest.reverse_kl)), tolerance=NEGATIVE,
        where=f"position {lowest.position}",
    )  # fmt: skip


# activations


def comparable(a: Model, b: Model) -> bool:
    """Whether they have the same activations and parameters, of the same sizes."""
    first, second = (
        (
            [(node.name, node.axes) for node in graph(one.config).nodes.values()],
            [graph(one.config).sizes(layer) for layer in (None, *range(len(one.config.layers)))],
            {name: one.decoder.weight(name).shape for name in _held(one)},
        )
        for one in (a, b)
    )
    return first == second


class _Activations:
    """A's residual stream is kept; B's activations come one by one, in execution order.

    Each is compared with what A's formula makes of B's own inputs, layer by layer; kept are those
    that later ones are made of.
    """

    def __init__(
        self, a: Model, b: Model, ids: Sequence[int], places: Places, progress: Progress
    ) -> None:
        self._a, self._b, self._ids, self._progress = a, b, ids, progress
        self._rows_a, self._rows_b = (list(at) for at in zip(*places, strict=True))
        model = graph(b.config)
        self._inputs = {
            name: formula_inputs(a.config, [name]) | formula_inputs(b.config, [name])
            for name in model.nodes
            if model.written(name) or name in edited(b)
        }
        nodes = [model.nodes[name] for name in self._inputs]
        ops = {node.name: node.op for node in nodes}  # each once, where it has two names
        self._names = [one.name for one in nodes if ops.get(one.shares or "") != one.op]
        self._stream: dict[str, Tensor] = {}
        self._emitted: dict[str, Tensor] = {}
        self._streams: list[StreamDiff] = []
        self._nodes: list[NodeDiff] = []
        self._checks: list[ViewCheck] = []

    def added(self, report: DiffReport, ids_a: Sequence[int]) -> DiffReport:
        """The report with streams, nodes and B's check. Raises NotFinite."""

        def keep(name: str, tensor: Tensor) -> None:
            if ".resid_" in name:
                self._stream[name] = tensor[0]

        Passes(self._a, ids_a).at_once(keep, logits="none", until=len(self._a.config.layers) - 1)
        Passes(self._b, self._ids).at_once(self._watch, logits="all", until=None)
        self._settle()
        return replace(
            report, activations=len(self._rows_a), streams=tuple(self._streams),
            nodes=tuple(self._nodes), checks=(*report.checks, worst(self._checks)),
        )  # fmt: skip

    def _watch(self, name: str, tensor: Tensor) -> None:
        layer = layer_of(name)
        if layer is not None and self._emitted and layer not in map(layer_of, self._emitted):
            self._settle()
        if name in self._inputs:
            self._emitted[name] = tensor
        if name in self._stream and layer is not None:
            a_TD, b_TD = self._stream.pop(name)[self._rows_a], tensor[0][self._rows_b]
            self._streams.append(_stream(name, layer, self._rows_a, a_TD, b_TD))

    def _settle(self) -> None:
        ready = [name for name in self._names if name in self._emitted]
        if not ready:
            return
        self._progress("comparing activations", len(self._nodes), len(self._inputs))
        self._checks.append(
            formula_checks(self._b, self._ids, self._emitted, ready, rows=CHECKED_ROWS)
        )
        self._nodes += map(self._node, ready)
        self._names = [name for name in self._names if name not in ready]
        needed = {one for name in self._names for one in self._inputs[name]}
        self._emitted = {name: x for name, x in self._emitted.items() if name in needed}

    def _node(self, name: str) -> NodeDiff:
        a, b, rule = self._a, self._b, rules(self._a.config)[name]
        emitted = {one: x[0] for one, x in self._emitted.items()}
        every = rules(a.config), self._ids, emitted, name, ROWS, len(self._ids)
        names = _parameters(a, name)
        formats = {tuple(one.decoder.weight(of).format for one in (a, b)) for of in names}
        unlike = [one for pair in formats if len({*pair}) > 1 for one in pair]
        rounded = max((EPS.get(one, math.inf) / 2 for one in unlike), default=0.0)
        share, where, off, size = None, "", 0.0, 0.0
        if rounded < math.inf:
            share = 0.0
            for own in kernels(b, *every, weights=a):
                ours, theirs, allowed = compared(own, name, rounded)
                shares = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / allowed)
                shares = shares.nan_to_num(math.inf, math.inf)
                at = tuple(int(i) for i in np.unravel_index(int(shares.argmax()), shares.shape))
                if float(shares[at]) >= share:
                    share, (*front, row, column) = float(shares[at]), at
                    where = symbol(name, *front, own.positions[row], column)
        for own in kernels(a, *every):  # in A's arithmetic, which may be another one
            ours, theirs = rule.tensor(own), own.kernel(name)
            off += float((ours - theirs).where(ours != theirs, ours.new_zeros(())).square().sum())
            size += float(ours.square().sum())
        node = NodeDiff(name=name, error=_ratio(off, size), share=share, where=where)
        if not node.differs:
            return node
        changed = (compare_parameter(a, b, one) for one in names)
        formula = _formula(rule.op, graph(b.config).nodes[name].op)
        return replace(
            node, parameters=tuple(one for one in changed if one.error), formula=tuple(formula)
        )


def _stream(
    name: str, layer: int, positions: Sequence[int], a_TD: Tensor, b_TD: Tensor
) -> StreamDiff:
    device = float64_device(a_TD.device)
    a_TD, b_TD = a_TD.to(device, torch.float64), b_TD.to(device, torch.float64)
    off_T, size_T = (b_TD - a_TD).norm(dim=-1), a_TD.norm(dim=-1)
    errors_T = torch.where(off_T == 0, 0.0, off_T / size_T)
    cosines_T = torch.where(off_T == 0, 1.0, torch.cosine_similarity(a_TD, b_TD, dim=-1))
    at = int(errors_T.argmax())
    return StreamDiff(
        name=name, layer=layer, cosine=float(cosines_T.mean()),
        error=_ratio(float(off_T.square().sum()), float(size_T.square().sum())),
        worst=float(errors_T[at]), worst_at=positions[at], errors=errors_T.float().cpu().numpy(),
    )  # fmt: skip


def _ratio(off: float, size: float) -> float:
    """The root of the ratio of two sums of squares."""
    return math.sqrt(off / size) if off and size else math.inf if off else 0.0


def _held(model: Model) -> set[str]:
    return {*model.decoder.weight_names, "head.W"}


def _parameters(model: Model, name: str) -> list[str]:
    """The parameters in the formula of an activation, and of what is derived on the way to it."""
    of, op = graph(model.config), graph(model.config).nodes[name].op
    values = [getattr(op, one.name) for one in fields(op)]
    items = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    found = [one for one in items if isinstance(one, str) and one in _held(model)]
    derived = [one for one in op.inputs if not of.written(one)]
    return [*found, *(more for one in derived for more in _parameters(model, one))]


def _formula(a: Any, b: Any, of: str = "") -> Iterator[str]:
    """What differs of two operations, value by value: `eps 1e-06 → 1e-05`."""
    if type(a) is not type(b) or not is_dataclass(a):
        yield f"{of} {a} → {b}"
    elif a != b:
        for one in fields(a):
            before, after = getattr(a, one.name), getattr(b, one.name)
            yield from _formula(before, after, one.name) if before != after else ()


# parameters


def compare_parameter(a: Model, b: Model, name: str) -> ParameterDiff:
    """A parameter of both, in float64 a part at a time."""
    there = [one.decoder.weight(name) if name in _held(one) else None for one in (a, b)]
    weights = [one for one in there if one is not None]
    rows, *others = weights[0].shape
    off = size = 0.0
    changed: list[int] = []
    alike = len({one.shape for one in weights}) == 1 and len(weights) == 2
    step = max(1, (1 << 22) // max(1, math.prod(others)))
    for first in range(0, rows if alike else 0, step):
        x, y = (one.dense(rows=slice(first, first + step)).to("cpu", torch.float64)
                for one in weights)  # fmt: skip
        differ = (x != y).reshape(len(x), -1).any(1).nonzero()[:, 0].tolist()
        changed += [first + at for at in differ]
        off, size = off + float((y - x).square().sum()), size + float(x.square().sum())
    return ParameterDiff(
        name=name, format_a=there[0].format if there[0] else None,
        format_b=there[1].format if there[1] else None,
        error=_ratio(off, size) if alike else None, rows=rows, differing_rows=len(changed),
        first_row=min(changed, default=None),
    )  # fmt: skip


def measure_weights(a: Model, b: Model, progress: Progress = no_progress) -> DiffReport:
    """Every parameter of both, in execution order, without what B is."""
    names = list(dict.fromkeys([*graph(a.config).parameters, *graph(b.config).parameters]))
    found = []
    for done, name in enumerate(names):
        progress("comparing weights", done, len(names))
        found.append(compare_parameter(a, b, name))
    same = compare_parameter(a, a, names[0])
    words = f"A beside A is equal: {names[0]}"
    check = ViewCheck(name="itself", words=words, value=same.differing_rows, tolerance=0.0)
    return DiffReport(parameters=tuple(found), checks=(check,))
