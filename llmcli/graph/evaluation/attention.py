"""Rules of softmax attention per element: masked scores, softmax, `A V`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmcli.graph import ops
from llmcli.graph.evaluation.rule import (
    Numbers,
    Rule,
    dot,
    largest,
    products,
    size,
    symbol,
    total,
)
from llmcli.records.explanation import Element, Fact, Sum, Term


class Score(Rule[ops.Score]):
    """`S = Q Kᵀ / √(d/h) + M`, `[H, T, S]`: −∞ for masked keys."""

    def hides(self, query: int, key: int) -> str:
        """The reason why the key is masked for the query; empty if it is not."""
        window = self.op.window
        mask = symbol("M", query, key)
        masked = f"mask {mask} = −∞: token {query} may not attend to token {key}"
        if key > query:
            return f"{masked}, which comes after it"
        if window == 1 and query != key:
            return f"{masked}: it sees only itself"
        if window is not None and query - key >= window:
            return f"{masked}: it sees the last {window} tokens, itself included"
        return ""

    def magnitude(self, values: Numbers, name: str, index: tuple[int, ...]) -> float:
        """Bound by ‖q‖ · ‖k‖ · scale, since a small score may be a sum of large products."""
        head, query, _ = index
        q_d = values.kernel(self.op.query)[head, query]
        k_Sd = values.kernel(self.op.key)[head // self.op.group, : query + 1]
        size = float(q_d.norm() * k_Sd.norm(dim=1).max()) * abs(self.op.factor(query))
        return size + self._slope(head) * query + values.least

    def _slope(self, head: int) -> float:
        return self.op.slopes[head] if self.op.slopes else 0.0

    def _lowered(self, positions: Sequence[int], keys: int) -> Tensor:
        """What the heads' slopes take off the scores, `[H, T, S]`, or 0."""
        slopes_H = torch.tensor(self.op.slopes or (0.0,), dtype=torch.float64)
        distance_TS = torch.tensor(positions)[:, None] - torch.arange(keys)
        return slopes_H[:, None, None] * distance_TS.clamp_min(0)

    def _factors(self, values: Numbers) -> Tensor:
        """The factor on each query's scores, `[T, 1]`."""
        found = [self.op.factor(position) for position in values.positions]
        return torch.tensor(found, dtype=torch.float64)[:, None]

    def tensor(self, values: Numbers) -> Tensor:
        """Head by head."""
        q_HTd, k_KSd = values[self.op.query], values.every(self.op.key)
        factors_T1 = self._factors(values)
        heads = [
            torch.einsum("td,sd->ts", q_Td, k_KSd[head // self.op.group]) * factors_T1
            for head, q_Td in enumerate(q_HTd)
        ]
        hidden_TS = self.hidden(values.positions, k_KSd.shape[1])
        s_HTS = torch.stack(heads) - self._lowered(values.positions, k_KSd.shape[1])
        if self.op.cap is not None:
            s_HTS = (s_HTS / self.op.cap).tanh() * self.op.cap
        return s_HTS.masked_fill_(hidden_TS, -math.inf)

    def hidden(self, positions: Sequence[int], keys: int) -> Tensor:
        """Mask of keys hidden from the queries at `positions`, `[T, S]`."""
        at_T1, at_S = torch.tensor(positions)[:, None], torch.arange(keys)
        hidden_TS = at_S > at_T1
        if self.op.window is not None:
            hidden_TS = hidden_TS | (at_T1 - at_S >= self.op.window)
        return hidden_TS

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs, and the sources of keys that are only shown."""
        return (*self.op.inputs, *_shown_from(self.rules, self.op.key))

    def magnitudes(self, values: Numbers) -> Tensor:
        """Σ|q·k|, scaled; a mask is exact, and a cap does not amplify rounding errors."""
        q_HTd, k_KSd = values[self.op.query].abs(), sizes(values, self.rules, self.op.key)
        k_HSd = k_KSd.repeat_interleave(self.op.group, 0)
        size_HTS = torch.einsum("htd,hsd->hts", q_HTd, k_HSd) * self._factors(values).abs()
        size_HTS += self._lowered(values.positions, k_KSd.shape[1])
        return size_HTS.masked_fill_(self.hidden(values.positions, k_KSd.shape[1]), 0.0)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """A dot product of a query and a key, scaled; or −∞."""
        head, query, key = index
        reason = self.hides(query, key)
        if reason:
            return Element(value=-math.inf, magnitude=0.0, note=reason)
        shared = head // self.op.group
        terms = products(
            values[self.op.query][head, query].tolist(), values[self.op.key][shared, key].tolist()
        )
        summed = total(terms)
        columns = (
            self.cell(self.op.query, head, query, "i"),
            self.cell(self.op.key, shared, key, "i"),
        )
        width = self.op.head_dim
        factor = self.op.factor(query)
        value, usual = summed * factor, self.op.usual and self.op.growth is None
        scaled = Fact(
            formula=f"Σ / √{width} = {{}} / {{}}" if usual else "Σ · scale = {} · {}",
            parts=(summed, math.sqrt(width) if usual else factor),
            value=value,
        )
        at = largest(terms).at
        after: tuple[Fact, ...] = (scaled,)
        lowered = self._slope(head) * (query - key)
        if self.op.slopes:
            parts = (value, self._slope(head), float(query - key))
            value -= lowered
            formula = "score − slope · distance = {} − {} · {}"
            after = (scaled, Fact(formula=formula, parts=parts, value=value))
        if (cap := self.op.cap) is not None:
            formula = f"{cap:g} · tanh({{}} / {cap:g})"
            capped = Fact(formula=formula, parts=(value,), value=cap * math.tanh(value / cap))
            value, after = capped.value, (*after, capped)
        return Element(
            value=value,
            magnitude=size(terms) * abs(factor) + lowered,
            note=_shared(self.op.group, head),
            sum=dot(columns, summed),
            terms=terms,
            after=after,
            follow=((self.op.query, (head, query, at)), (self.op.key, (shared, key, at))),
        )


class Softmax(Rule[ops.Softmax]):
    """`A = softmax(S)` row by row after subtracting the row's maximum, `[H, T, S]`.

    A sink is included in the maximum and the sum.
    """

    @property
    def formula(self) -> str:
        """The formula, continued by that of S."""
        product = self.scores.op.product(self.letter_of)
        return f"{super().formula} = {self.op.of(product, self.letter_of)}"

    @property
    def scores(self) -> Score:
        """The rule of the scores."""
        found = self.rules[self.op.source]
        assert isinstance(found, Score)
        return found

    def tensor(self, values: Numbers) -> Tensor:
        """Row by row."""
        return _softmax(values[self.op.source], self._sinks(values))[0]

    def row(self, values: Numbers, head: int, query: int) -> Tensor:
        """One row of A, `[S]`."""
        return _softmax(values[self.op.source][head, query], self._sinks(values)[head, 0])[0]

    def _sinks(self, values: Numbers) -> Tensor:
        """The heads' sink scores, `[H, 1, 1]`; −∞ without sinks."""
        if self.op.sink is None:
            heads = len(values[self.op.source])
            return torch.full((heads, 1, 1), -math.inf, dtype=torch.float64)
        return values.vector(self.op.sink)[:, None, None]

    def magnitude(self, values: Numbers, name: str, index: tuple[int, ...]) -> float:
        """The largest weight of the row; exactly 0 for masked keys."""
        hidden = self.scores.hides(*index[1:])
        return 0.0 if hidden else super().magnitude(values, name, index)

    def magnitudes(self, values: Numbers) -> Tensor:
        """A weight times the magnitude of its score, as for an exponential.

        The kernel does not store scores: their rounding errors are in the weights.
        """
        size_HTS = self.scores.magnitudes(values)
        return _uncertain(values[self.op.source], size_HTS, self._sinks(values))

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The whole row of scores, their exponentials, and one weight."""
        head, query, key = index
        reason = self.scores.hides(query, key)
        row = values[self.op.source][head, query].tolist()
        seen = [at for at in range(len(row)) if not self.scores.hides(query, at)]
        sink = float(self._sinks(values)[head])
        top = max(sink, *(row[at] for at in seen))
        exps = {at: math.exp(row[at] - top) for at in seen}
        summed, taken = math.fsum(exps.values()), math.exp(sink - top)
        every = summed + taken
        terms = tuple(
            Term(at=at, parts=(row[at], e, e / every), value=e, label=values.texts[at])
            for at, e in exps.items()
        )
        cell = symbol("S", head, query, "s")
        columns = ("S", "e^(S − max)", "A")
        sum_ = Sum(formula=f"e^({cell} − max)", over="s", columns=columns, value=summed)
        peak, all_of_it = Fact(formula=f"max = max {cell} over s", parts=(), value=top), "Σ"
        after: tuple[Fact, ...] = ()
        if self.op.sink is not None:
            own = self.cell(self.op.sink, head)
            peak = Fact(formula=f"max = max({own}, max {cell} over s)", parts=(), value=top)
            all_of_it = f"(Σ + e^({own} − max))"
            formula = f"Σ + e^({own} − max) = {{}} + {{}}"
            after = (Fact(formula=formula, parts=(summed, taken), value=every),)
        if reason:
            zero = Fact(formula=f"e^(−∞ − max) / {all_of_it} = 0 / {{}}", parts=(every,), value=0.0)
            return Element(
                value=0.0, magnitude=0.0, note=reason, before=(peak,), sum=sum_, terms=terms,
                after=(*after, zero), follow=((self.op.source, index),),
            )  # fmt: skip
        value = exps[key] / every
        share = Fact(
            formula=f"e^({symbol('S', *index)} − max) / {all_of_it} = {{}} / {{}}",
            parts=(exps[key], every),
            value=value,
        )
        magnitude = float(self.row_magnitudes(values, head, query)[key])
        return Element(
            value=value, magnitude=magnitude, before=(peak,), sum=sum_, terms=terms,
            after=(*after, share), follow=((self.op.source, index),),
        )  # fmt: skip

    def row_magnitudes(self, values: Numbers, head: int, query: int) -> Tensor:
        """The magnitudes of one row, `[S]`."""
        s_S, scores = values[self.op.source][head, query], self.scores
        k_Sd = sizes(values, self.rules, scores.op.key)[head // scores.op.group]
        q_d = values[scores.op.query][head, query].abs()
        size_S = (k_Sd * q_d).sum(-1) * abs(scores.op.factor(query))
        size_S = size_S.masked_fill_(s_S == -math.inf, 0.0)
        return _uncertain(s_S, size_S, self._sinks(values)[head, 0])


class Mix(Rule[ops.Mix]):
    """`C = A V`: per query, the weighted sum of all keys' values, `[H, T, e]`."""

    @property
    def weights(self) -> Rule[Any]:
        """The rule of the weights."""
        return self.rules[self.op.pattern]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs, and the sources of values that are only shown."""
        return (*self.op.inputs, *_shown_from(self.rules, self.op.value))

    def tensor(self, values: Numbers) -> Tensor:
        """Head by head."""
        v_KSe = values.every(self.op.value)
        return torch.stack(
            [
                torch.einsum("ts,se->te", a_TS, v_KSe[head // self.op.group])
                for head, a_TS in enumerate(values[self.op.pattern])
            ]
        )

    def magnitudes(self, values: Numbers) -> Tensor:
        """Uncertainty of the weights times the values: a fused kernel stores neither S nor A."""
        v_HSe = sizes(values, self.rules, self.op.value).repeat_interleave(self.op.group, 0)
        return torch.einsum("hts,hse->hte", self.weights.magnitudes(values), v_HSe)

    def halves(self, values: Numbers, result: Tensor) -> Tensor:
        """Including the weights, which the fused kernel rounds before the product with values.

        Subnormal float16 weights have the absolute rounding of the smallest normal one. Keys and
        values that are only shown are themselves rounded.
        """
        v_HSe = values.every(self.op.value).abs().repeat_interleave(self.op.group, 0)
        a_HtS = values[self.op.pattern]
        least = torch.finfo(values.dtype).tiny
        rounded_HtS = torch.where(a_HtS > 0, a_HtS + least, 0.0)
        found = result.abs() + torch.einsum("hts,hse->hte", rounded_HtS, v_HSe)
        if not _is_shown(self.rules, self.op.value):
            return found
        return found + torch.einsum("hts,hse->hte", self.weights.magnitudes(values), v_HSe)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """One weight and one value for every key with a weight."""
        head, query, i = index
        shared = head // self.op.group
        weights = values[self.op.pattern][head, query].tolist()
        numbers = values[self.op.value][shared, :, i].tolist()
        terms = tuple(
            Term(at=at, parts=(a, v), value=a * v, label=values.texts[at])
            for at, (a, v) in enumerate(zip(weights, numbers, strict=True))
            if at <= query
        )
        columns = (symbol("A", head, query, "s"), symbol("V", shared, "s", i))
        value = total(terms)
        at = largest(terms).at
        if isinstance(self.weights, Softmax):
            off_S = self.weights.row_magnitudes(values, head, query)
        else:
            off_S = self.weights.magnitudes(values)[head, query]
        return Element(
            value=value,
            magnitude=float((off_S * sizes(values, self.rules, self.op.value)[shared, :, i]).sum()),
            note=_shared(self.op.group, head),
            sum=dot(columns, value, over="s"),
            terms=terms,
            follow=((self.op.pattern, (head, query, at)), (self.op.value, (shared, at, i))),
        )


def sizes(values: Numbers, rules: Mapping[str, Rule[Any]], name: str) -> Tensor:
    """Magnitudes of all keys or values, `[K, S, d]`.

    Kernels do not read those that are only shown, but compute with their sources.
    """
    if not _is_shown(rules, name):
        return values.every(name).abs()
    node = rules[name].node
    if isinstance(node.op, ops.Join):
        start_HSd = sizes(values, rules, node.op.start)
        end = values.every(node.op.end).abs().expand(len(start_HSd), -1, -1)
        return torch.cat((start_HSd, end), -1)
    assert isinstance(node.op, ops.Project)
    w_KN = values.columns(node.op.weight, slice(None)).abs()
    size_SN = torch.einsum("sk,kn->sn", values.every(node.op.source).abs(), w_KN)
    return torch.stack(size_SN.chunk(node.op.heads, dim=-1))


def _shown_from(rules: Mapping[str, Rule[Any]], name: str) -> Iterator[str]:
    """Yield the sources of keys or values that are only shown; nothing for others."""
    if _is_shown(rules, name):
        for source in rules[name].op.inputs:
            yield from (() if _is_shown(rules, source) else (source,))
            yield from _shown_from(rules, source)


def _is_shown(rules: Mapping[str, Rule[Any]], name: str) -> bool:
    return name in rules and rules[name].node.shown


def _softmax(s: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights `[…, S]`, the share of the sink `[…, 1]`, and the maximum of both `[…, 1]`."""
    top = torch.maximum(s.amax(-1, keepdim=True), sink)
    e, taken = torch.exp(s - top), torch.exp(sink - top)
    every = e.sum(-1, keepdim=True) + taken
    return e / every, taken / every, top


def _uncertain(s: Tensor, size: Tensor, sink: Tensor) -> Tensor:
    """Uncertainty of weights `[…, S]` in eps, for scores `s` with magnitudes `size`.

    The relative error of a weight is the error of its score plus that of the sum: e^x(1 + dx). A
    sink's score is exact.
    """
    a, taken, top = _softmax(s, sink)
    off = size + torch.where(s == -math.inf, 0.0, top - s)
    in_sum = (a * off).sum(-1, keepdim=True)
    in_sum = in_sum + torch.where(sink == -math.inf, 0.0, taken * (top - sink))
    return a * (1 + off + in_sum)


def _shared(group: int, head: int) -> str:
    if group == 1:
        return ""
    first = head // group * group
    return (
        f"heads {first} to {first + group - 1} share the keys and values of kv head {head // group}"
    )
