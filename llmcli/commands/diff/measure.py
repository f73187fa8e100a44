"""Two models side by side: their predictions, residual streams, activations and parameters.

Letters: T tokens of one forward call, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcli.commands.diff.report import (
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
PART = 1 << 22  # numbers of a parameter in float64
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
    a: Side, b: Side, *, window: int, stride: int, aligned: bool = False,
    progress: Progress = no_progress,
) -> DiffReport:
    """B beside A, without what B is.

    Where both have the same ids they read them chunk by chunk side by side, in windows as
    `predictions` does. `aligned`: their texts are two prompts of at most `CHUNK` tokens. Else only
    their scores are compared. Raises NotFinite, and UsageError where nothing is aligned.
    """  # fmt: skip
    most, alignment = min(CHUNK, window), None
    tokens: list[TokenDiff] = []
    same, places = list(a.ids) == list(b.ids), _at(0, min(len(a.ids), most))
    if aligned:
        alignment, places = align(a.ids, b.ids)
        at = list(zip(*places, strict=True))
        logits = [one.ready()(len(one.ids))(one.ids)[[*at[i]]] for i, one in enumerate((a, b))]
        tokens += _tokens(a, b, [(i + 1, j + 1) for i, j in places], *logits)
    elif same:
        readers = [a.ready(), b.ready()]
        for position, logits in predictions(readers, a.ids, window, stride, beyond=True):
            tokens += _tokens(a, b, _at(position, len(logits[0])), *logits)
            progress("reading", position, len(a.ids))
    pairs = [(one.a, one.b) for one in tokens]
    known = [(of_a, of_b) for of_a, of_b in pairs if of_a is not None and of_b is not None]
    logprobs = zip(*pairs, strict=True) if same else (_logprobs(s, window, stride) for s in (a, b))
    score_a, score_b = (
        TextScore.of([None, *found][: len(side.ids)], side.spans)
        for side, found in zip((a, b), logprobs, strict=True)
    )
    report = DiffReport(
        score_a=score_a, score_b=score_b, same_tokens=same, tokens=tuple(tokens),
        largest_difference=max((0.0 if x == y else abs(x - y) for x, y in known), default=None),
        alignment=alignment, divergence=divergence(tokens) if tokens else None,
        checks=(_itself(a, most), *([_not_negative(tokens)] if tokens else ())),
    )  # fmt: skip
    if not tokens or b.read is not None or not comparable(a.model, b.model):
        return report
    return _with_activations(report, a, b, most, places, progress)


def _at(first: int, count: int) -> Places:
    return [(at, at) for at in range(first, first + count)]


def align(a: Sequence[int], b: Sequence[int]) -> tuple[tuple[int, int], Places]:
    """All positions of two equally long prompts, else those of a common beginning and end.

    Also how many are of the beginning and of the end. Raises UsageError where there are none.
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
    return (first, last), [*_at(0, first), *ends]


# predictions


def _logprobs(side: Side, window: int, stride: int) -> list[float]:
    found: list[float] = []
    for position, (logits_TV,) in predictions([side.ready()], side.ids, window, stride):
        ids = side.ids[position : position + len(logits_TV)]
        found += chosen(logits_TV.log_softmax(-1), ids, position, side.model.dtype)[0]
    return found


def _tokens(a: Side, b: Side, places: Places, *logits: Tensor) -> Iterator[TokenDiff]:
    """Of predictions for the tokens at these places, by the logits `[T, V]` of A and B.

    The vocabulary is what both have: an embedding may be padded beyond it.
    """
    vocabulary, device = min(one.shape[1] for one in logits), float64_device(logits[0].device)
    spelled_a, spelled_b = (cache(one.model.token_text) for one in (a, b))
    for first in range(0, len(places), AT_ONCE):
        rows = slice(first, first + AT_ONCE)
        some = places[rows]
        logs = [one[rows, :vocabulary].to(device, torch.float64).log_softmax(-1) for one in logits]
        tops = [log.argmax(-1).tolist() for log in logs]
        next_ids = [
            a.ids[i] if i < len(a.ids) and j < len(b.ids) and a.ids[i] == b.ids[j] else None
            for i, j in some
        ]
        known = [id or 0 for id in next_ids]
        (a_T, rank_a), (b_T, rank_b), (_, b_in_a), (_, a_in_b) = (
            chosen(logs[side], ids, some[0][side], (a, b)[side].model.dtype)
            for side, ids in ((0, known), (1, known), (0, tops[1]), (1, tops[0]))
        )
        kl, reverse = divergences(*logs).tolist(), divergences(*reversed(logs)).tolist()
        for at, id in enumerate(next_ids):
            there = id is not None
            yield TokenDiff(
                position=some[at][0], id=id, text="" if id is None else spelled_a(id),
                a=a_T[at] if there else None, rank_a=rank_a[at] if there else None,
                b=b_T[at] if there else None, rank_b=rank_b[at] if there else None,
                kl=kl[at], reverse_kl=reverse[at], top_a_in_b=a_in_b[at], top_b_in_a=b_in_a[at],
                top_a=Token(id=tops[0][at], text=spelled_a(tops[0][at])),
                top_b=Token(id=tops[1][at], text=spelled_b(tops[1][at])),
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


def _itself(a: Side, most: int) -> ViewCheck:
    """A's first tokens, read twice: nothing may differ."""
    ids, off = a.ids[: min(SAMPLE, most)], {}
    for position, both in predictions([a.ready()] * 2, ids, len(ids) + 1, 1, beyond=True):
        for one in _tokens(a, a, _at(position, len(both[0])), *both):
            ranks = one.top_a_in_b + one.top_b_in_a - 2.0
            off[one.position] = max(abs(one.kl), abs(one.reverse_kl), ranks)
    at = max(off, key=off.__getitem__)
    words = f"A read twice is A: {counted(len(ids), 'token')}"
    return ViewCheck(
        name="itself", words=words, value=off[at], tolerance=0.0, where=f"position {at}"
    )


def _not_negative(tokens: Sequence[TokenDiff]) -> ViewCheck:
    lowest, at = min((min(one.kl, one.reverse_kl), one.position) for one in tokens)
    words = f"no divergence is negative: {2 * len(tokens):,} of them"
    return ViewCheck(
        name="divergence", words=words, value=max(0.0, -lowest), tolerance=NEGATIVE,
        where=f"position {at}",
    )  # fmt: skip


# activations


def comparable(a: Model, b: Model) -> bool:
    """Whether they have the same activations and parameters, of the same sizes."""

    def shapes(one: Model) -> tuple[Any, ...]:
        of, layers = graph(one.config), (None, *range(len(one.config.layers)))
        nodes = [(node.name, node.axes) for node in of.nodes.values()]
        weights = {name: one.decoder.weight(name).shape for name in _held(one)}
        return nodes, [of.sizes(layer) for layer in layers], weights

    return shapes(a) == shapes(b)


def _with_activations(
    report: DiffReport, a: Side, b: Side, most: int, places: Places, progress: Progress
) -> DiffReport:
    """The report with streams, nodes and B's check, of `most` tokens. Raises NotFinite.

    A's residual stream is kept. B's activations come one by one, in execution order, and are
    compared layer by layer with what A's formulas make of B's own inputs; kept are those that later
    ones are made of.
    """
    ids, of = b.ids[:most], graph(b.model.config)
    rows_a, rows_b = (list(at) for at in zip(*places, strict=True))
    inputs = {
        name: formula_inputs(a.model.config, [name]) | formula_inputs(b.model.config, [name])
        for name in of.nodes
        if of.written(name) or name in edited(b.model)
    }
    ops = {name: of.nodes[name].op for name in inputs}  # each once, where it has two names
    left = [name for name in inputs if ops.get(of.nodes[name].shares or "") != ops[name]]
    stream: dict[str, Tensor] = {}
    emitted: dict[str, Tensor] = {}
    streams: list[StreamDiff] = []
    nodes: list[NodeDiff] = []
    checks: list[ViewCheck] = []

    def keep(name: str, tensor: Tensor) -> None:
        if ".resid_" in name:
            stream[name] = tensor[0][rows_a]

    def settle() -> None:
        ready = [name for name in left if name in emitted]
        if ready:
            progress("comparing activations", len(nodes), len(inputs))
            checks.append(formula_checks(b.model, ids, emitted, ready, rows=CHECKED_ROWS))
            nodes.extend(_node(a.model, b.model, ids, emitted, name) for name in ready)
            left[:] = [name for name in left if name not in ready]
            needed = {one for name in left for one in inputs[name]}
            for name in emitted.keys() - needed:
                del emitted[name]

    def watch(name: str, tensor: Tensor) -> None:
        layer = layer_of(name)
        if layer is not None and emitted and layer not in map(layer_of, emitted):
            settle()
        if name in inputs:
            emitted[name] = tensor
        if name in stream and layer is not None:
            streams.append(_stream(name, layer, stream.pop(name), tensor[0][rows_b]))

    a.ready()
    Passes(a.model, a.ids[:most]).at_once(
        keep, logits="none", until=len(a.model.config.layers) - 1
    )
    b.ready()
    Passes(b.model, ids).at_once(watch, logits="all", until=None)
    settle()
    return replace(
        report, activations=len(rows_a), streams=tuple(streams), nodes=tuple(nodes),
        checks=(*report.checks, worst(checks)),
    )  # fmt: skip


def _node(
    a: Model, b: Model, ids: Sequence[int], known: Mapping[str, Tensor], name: str
) -> NodeDiff:
    rule, names = rules(a.config)[name], _parameters(a, name)
    every = rules(a.config), ids, {one: x[0] for one, x in known.items()}, name, ROWS, len(ids)
    formats = [{one.decoder.weight(of).format for one in (a, b)} for of in names]
    unlike = [one for pair in formats if len(pair) > 1 for one in pair]
    rounded = max((EPS.get(one, math.inf) / 2 for one in unlike), default=0.0)
    share, where, off, size = None, "", 0.0, 0.0
    for own in kernels(b, *every, weights=a) if rounded < math.inf else ():
        ours, theirs, allowed = compared(own, name, rounded)
        shares = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / allowed)
        shares = shares.nan_to_num(math.inf, math.inf)
        at = tuple(int(i) for i in np.unravel_index(int(shares.argmax()), shares.shape))
        if share is None or float(shares[at]) >= share:
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
    formula = tuple(_formula(rule.op, graph(b.config).nodes[name].op))
    return replace(node, parameters=tuple(one for one in changed if one.error), formula=formula)


def _stream(name: str, layer: int, a_TD: Tensor, b_TD: Tensor) -> StreamDiff:
    device = float64_device(a_TD.device)
    a_TD, b_TD = a_TD.to(device, torch.float64), b_TD.to(device, torch.float64)
    off_T, size_T = (b_TD - a_TD).norm(dim=-1), a_TD.norm(dim=-1)
    errors_T = torch.where(off_T == 0, 0.0, off_T / size_T)
    cosines_T = torch.where(off_T == 0, 1.0, torch.cosine_similarity(a_TD, b_TD, dim=-1))
    return StreamDiff(
        name=name, layer=layer, cosine=float(cosines_T.mean()),
        error=_ratio(float(off_T.square().sum()), float(size_T.square().sum())),
        errors=errors_T.float().cpu().numpy(),
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
    formats = [None if one is None else one.format for one in there]
    rows, *others = weights[0].shape
    off = size = 0.0
    changed: list[int] = []
    alike = len({one.shape for one in weights}) == 1 and len(weights) == 2
    step = max(1, PART // max(1, math.prod(others)))
    for first in range(0, rows if alike else 0, step):
        part = slice(first, first + step)
        x, y = (one.dense(rows=part).to("cpu", torch.float64) for one in weights)
        differ = (x != y).reshape(len(x), -1).any(1).nonzero()[:, 0].tolist()
        changed += [first + at for at in differ]
        off, size = off + float((y - x).square().sum()), size + float(x.square().sum())
    return ParameterDiff(
        name=name, format_a=formats[0], format_b=formats[1], rows=rows,
        error=_ratio(off, size) if alike else None, differing_rows=len(changed),
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
