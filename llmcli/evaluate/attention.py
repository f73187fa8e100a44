"""Rules of softmax attention per element: masked scores, softmax, `A V`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmcli.config.attention import Chunk, first_key
from llmcli.evaluate.numbers import Number, Of, leaf, tanh
from llmcli.evaluate.rule import Axis, Numbers, Reader, Rule, symbol
from llmcli.evaluate.softmax import NO_SINK, share, softmax, uncertainty
from llmcli.graph import ops


class Score(Rule[ops.Score]):
    """`S = Q Kᵀ / √(d/h) + M`, `[H, T, S]`: −∞ for masked keys."""

    def hides(self, query: int, key: int) -> str:
        """The reason why the key is masked for the query; empty if it is not."""
        window = self.op.config.window
        mask = symbol("M", query, key)
        masked = f"mask {mask} = −∞: token {query} may not attend to token {key}"
        if key > query:
            return f"{masked}, which comes after it"
        if window is None or key >= (first := first_key(query, window)):
            return ""
        if isinstance(window, Chunk):
            seen = f"only its chunk of {window.size} tokens, which begins with token {first}"
        else:
            seen = "only itself" if window == 1 else f"the last {window} tokens, itself included"
        return f"{masked}: it sees {seen}"

    def hidden(self, positions: Sequence[int], keys: int) -> Tensor:
        """Mask of keys hidden from the queries at `positions`, `[T, S]`."""
        at_T1, at_S = torch.tensor(positions)[:, None], torch.arange(keys)
        hidden_TS = at_S > at_T1
        if (window := self.op.config.window) is not None:
            hidden_TS = hidden_TS | (at_S < first_key(at_T1, window))
        return hidden_TS

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs, and the sources of keys that are only shown."""
        return (*super().inputs, *_shown_from(self.rules, self.op.key))

    def magnitude(self, values: Numbers, index: tuple[int, ...]) -> float:
        """Bound by ‖q‖ · ‖k‖ · scale, since a small score may be a sum of large products."""
        head, query, _ = index
        q_d = values.kernel(self.op.query)[head, query]
        k_Sd = values.kernel(self.op.key)[head // self.op.group, : query + 1]
        size = float(q_d.norm() * k_Sd.norm(dim=1).max()) * abs(self.op.factor(query))
        lowered = self.op.config.slopes[head] * query if self.op.config.slopes else 0.0
        return size + lowered + values.least

    def _contract(self, values: Numbers, k_KSd: Tensor, of: Of) -> Tensor:
        """Head by head, scaled and lowered by distance; of the queries, factors and slopes `of`."""
        s_HTS = _by_head("td,sd->ts", of(values[self.op.query]), k_KSd, self.op.group)
        factors = [self.op.factor(position) for position in values.positions]
        s_HTS = s_HTS * of(torch.tensor(factors, dtype=torch.float64)[:, None])
        if not self.op.config.slopes:
            return s_HTS
        slopes_H11 = torch.tensor(self.op.config.slopes, dtype=torch.float64)[:, None, None]
        distance_TS = torch.tensor(values.positions)[:, None] - torch.arange(s_HTS.shape[-1])
        return s_HTS + of(-slopes_H11 * distance_TS.clamp_min(0))

    def tensor(self, values: Numbers) -> Tensor:
        """Head by head, capped and masked."""
        s_HTS = self._contract(values, values.every(self.op.key), lambda x: x)
        if (cap := self.op.config.cap) is not None:
            s_HTS = (s_HTS / cap).tanh() * cap
        return s_HTS.masked_fill_(self.hidden(values.positions, s_HTS.shape[-1]), -math.inf)

    def magnitudes(self, values: Numbers) -> Tensor:
        """Σ|q·k|, scaled, + slope · distance; a mask is exact, a cap does not amplify errors."""
        k_KSd = sizes(values, self.rules, self.op.key)
        size_HTS = self._contract(values, k_KSd, torch.abs)
        return size_HTS.masked_fill_(self.hidden(values.positions, size_HTS.shape[-1]), 0.0)

    def _compute(self, read: Reader) -> Number:
        op, (head, query, key) = self.op, read.index
        read.note = self.hides(query, key)
        if read.note:
            return leaf(-math.inf, "")
        shared, factor = head // op.group, op.factor(query)
        read.note = _shared(op.group, head)
        summed = read.dot(
            read.row(op.query, head, query, Axis()), read.row(op.key, shared, key, Axis())
        )
        made = summed * leaf(factor, "scale")
        if op.usual and op.config.growth is None:
            root = leaf(math.sqrt(op.head_dim), f"√{op.head_dim}")
            made = replace(summed / root, x=made.x)
        if op.config.slopes:
            slope, distance = leaf(op.config.slopes[head], "slope"), leaf(query - key, "distance")
            made = made.line("score") - slope * distance
        cap = op.config.cap
        return made if cap is None else cap * tanh(made.line("score") / cap)


class Softmax(Rule[ops.Softmax]):
    """`A = softmax(S)` row by row after subtracting the row's maximum, `[H, T, S]`.

    A sink is included in the maximum and the sum.
    """

    @property
    def formula(self) -> str:
        """The formula, continued by that of S."""
        product = self.scores.op.right_side(self.scores.letter, self.letter_of)
        return f"{super().formula} = {self.op.of(product, self.letter_of)}"

    @property
    def scores(self) -> Score:
        """The rule of the scores."""
        found = self.rules[self.op.source]
        assert isinstance(found, Score)
        return found

    def tensor(self, values: Numbers) -> Tensor:
        """Row by row."""
        return softmax(values[self.op.source], self._sinks(values))

    def row_of(self, values: Numbers, head: int, query: int) -> Tensor:
        """One row of A, `[S]`."""
        return softmax(values[self.op.source][head, query], self._sinks(values)[head, 0])

    def _sinks(self, values: Numbers) -> Tensor:
        """The heads' sink scores, `[H, 1, 1]`; −∞ without sinks."""
        if self.op.sink is None:
            return NO_SINK.expand(len(values[self.op.source]), 1, 1)
        return values.vector(self.op.sink)[:, None, None]

    def magnitude(self, values: Numbers, index: tuple[int, ...]) -> float:
        """The largest weight of the row; exactly 0 for masked keys."""
        hidden = self.scores.hides(*index[1:])
        return 0.0 if hidden else super().magnitude(values, index)

    def magnitudes(self, values: Numbers) -> Tensor:
        """A weight times the magnitude of its score, as for an exponential.

        The kernel does not store scores: their rounding errors are in the weights.
        """
        size_HTS = self.scores.magnitudes(values)
        return uncertainty(values[self.op.source], size_HTS, self._sinks(values))

    def _compute(self, read: Reader) -> Number:
        op, values, (head, query, key) = self.op, read.values, read.index
        row, sink = values[op.source][head, query].tolist(), None
        if op.sink is not None:
            sink = self.leaf(self._sinks(values)[head], op.sink, head)
        read.note = self.scores.hides(query, key)
        read.follow.append((op.source, read.index))
        return share(
            read,
            {at: row[at] for at in range(len(row)) if not self.scores.hides(query, at)},
            key,
            lambda at: symbol("S", head, query, at),
            "s",
            columns=("S", "e^(S − max)", "A"),
            sink=sink,
        )


class Mix(Rule[ops.Mix]):
    """`C = A V`: per query, the weighted sum of all keys' values, `[H, T, e]`."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs, and the sources of values that are only shown."""
        return (*self.op.inputs, *_shown_from(self.rules, self.op.value))

    def tensor(self, values: Numbers) -> Tensor:
        """Head by head."""
        return self._mixed(values[self.op.pattern], values.every(self.op.value))

    def _mixed(self, a_HTS: Tensor, v_KSe: Tensor) -> Tensor:
        return _by_head("ts,se->te", a_HTS, v_KSe, self.op.group)

    def magnitudes(self, values: Numbers) -> Tensor:
        """Uncertainty of the weights times the values: a fused kernel stores neither S nor A."""
        v_KSe = sizes(values, self.rules, self.op.value)
        return self._mixed(self.rules[self.op.pattern].magnitudes(values), v_KSe)

    def halves(self, values: Numbers, result: Tensor) -> Tensor:
        """Including the weights, which the fused kernel rounds before the product with values.

        Subnormal float16 weights have the absolute rounding of the smallest normal one. Keys and
        values that are only shown are themselves rounded.
        """
        v_KSe, a_HTS = values.every(self.op.value).abs(), values[self.op.pattern]
        rounded_HTS = torch.where(a_HTS > 0, a_HTS + torch.finfo(values.dtype).tiny, 0.0)
        if _is_shown(self.rules, self.op.value):
            rounded_HTS = rounded_HTS + self.rules[self.op.pattern].magnitudes(values)
        return result.abs() + self._mixed(rounded_HTS, v_KSe)

    def _compute(self, read: Reader) -> Number:
        op, (head, query, i), s = self.op, read.index, Axis(over="s", end=read.index[1] + 1)
        read.note = _shared(op.group, head)
        return read.dot(
            read.row(op.pattern, head, query, s),
            read.row(op.value, head // op.group, s, i),
            labels=read.values.texts[: query + 1],
        )


def _by_head(product: str, x_HTa: Tensor, y_KSb: Tensor, group: int) -> Tensor:
    """The products of every head's rows with those of the key head that its group shares."""
    return torch.stack([torch.einsum(product, x, y_KSb[h // group]) for h, x in enumerate(x_HTa)])


def sizes(values: Numbers, rules: Mapping[str, Rule[Any]], name: str) -> Tensor:
    """Magnitudes of what a kernel rounds of all keys or values, `[K, S, d]`.

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
    return name in rules and rules[name].node.tap_only


def _shared(group: int, head: int) -> str:
    if group == 1:
        return ""
    first = head // group * group
    return (
        f"heads {first} to {first + group - 1} share the keys and values of kv head {head // group}"
    )
