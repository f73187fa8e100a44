"""Rules of softmax attention, cell by cell: scores with their mask, softmax, `A V`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmcli.config import AttentionConfig
from llmcli.explain.rule import Element, Rule, dot, largest, products, size, symbol, total
from llmcli.reports.explanation import Fact, Sum, Term

if TYPE_CHECKING:
    from llmcli.explain.kernel import Kernel


@dataclass(frozen=True, kw_only=True)
class Scores(Rule):
    """`S = Q Kᵀ / √(d/h) + M`, `[H, T, S]`: −∞ for keys that a query may not look at."""

    attention: AttentionConfig
    query: str
    key: str
    query_letter: str
    key_letter: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Queries and keys."""
        return (self.query, self.key)

    @property
    def group(self) -> int:
        """How many query heads share a key/value head."""
        return self.attention.heads // self.attention.kv_heads

    def hides(self, query: int, key: int) -> str:
        """Why the query may not look at the key, empty where it may."""
        window = self.attention.window
        masked = f"mask {symbol('M', query, key)} = −∞: token {query} may not look at token {key}"
        if key > query:
            return f"{masked}, which comes after it"
        if window == 1 and query != key:
            return f"{masked}: it sees only itself"
        if window is not None and query - key >= window:
            return f"{masked}: it sees the last {window} tokens, itself included"
        return ""

    def magnitude(self, values: Kernel, name: str, index: tuple[int, ...]) -> float:
        """A score can be small because large products cancel: ‖q‖ · ‖k‖ · scale bounds them."""
        head, query, _ = index
        q_d = values.kernel(self.query)[head, query]
        k_Sd = values.kernel(self.key)[head // self.group, : query + 1]
        size = float(q_d.norm() * k_Sd.norm(dim=1).max()) * abs(self.attention.scale)
        return size + values.least

    def tensor(self, values: Kernel) -> Tensor:
        """Head by head."""
        q_HTd, k_KSd = values[self.query], values.every(self.key)
        heads = [
            torch.einsum("td,sd->ts", q_Td, k_KSd[head // self.group]) * self.attention.scale
            for head, q_Td in enumerate(q_HTd)
        ]
        hidden_TS = self.hidden(values.positions, k_KSd.shape[1])
        return torch.stack(heads).masked_fill_(hidden_TS, -math.inf)

    def hidden(self, positions: Sequence[int], keys: int) -> Tensor:
        """Which keys the queries at those positions may not look at, `[T, S]`."""
        at_T1, at_S = torch.tensor(positions)[:, None], torch.arange(keys)
        hidden_TS = at_S > at_T1
        if self.attention.window is not None:
            hidden_TS = hidden_TS | (at_T1 - at_S >= self.attention.window)
        return hidden_TS

    def magnitudes(self, values: Kernel) -> Tensor:
        """Σ|q·k|, scaled; a mask is exact."""
        q_HTd, k_KSd = values[self.query].abs(), values.every(self.key).abs()
        k_HSd = k_KSd.repeat_interleave(self.group, 0)
        size_HTS = torch.einsum("htd,hsd->hts", q_HTd, k_HSd) * abs(self.attention.scale)
        return size_HTS.masked_fill_(self.hidden(values.positions, k_KSd.shape[1]), 0.0)

    def element(self, values: Kernel, index: tuple[int, ...]) -> Element:
        """A dot product of a query and a key, scaled; or −∞."""
        head, query, key = index
        reason = self.hides(query, key)
        if reason:
            return Element(value=-math.inf, magnitude=0.0, note=reason)
        shared = head // self.group
        terms = products(
            values[self.query][head, query].tolist(), values[self.key][shared, key].tolist()
        )
        summed = total(terms)
        columns = (
            symbol(self.query_letter, head, query, "i"),
            symbol(self.key_letter, shared, key, "i"),
        )
        width = self.attention.head_dim
        value = summed * self.attention.scale
        usual = is_usual(self.attention)
        scaled = Fact(
            formula=f"Σ / √{width} = {{}} / {{}}" if usual else "Σ · scale = {} · {}",
            parts=(summed, math.sqrt(width) if usual else self.attention.scale),
            value=value,
        )
        at = largest(terms).at
        return Element(
            value=value,
            magnitude=size(terms) * abs(self.attention.scale),
            note=_shared(self.attention, head),
            sum=dot(columns, summed),
            terms=terms,
            after=(scaled,),
            follow=((self.query, (head, query, at)), (self.key, (shared, key, at))),
        )


@dataclass(frozen=True, kw_only=True)
class Pattern(Rule):
    """`A = softmax(S)` row by row, with the row's maximum taken off first, `[H, T, S]`."""

    source: str
    scores: Scores

    @property
    def inputs(self) -> tuple[str, ...]:
        """The scores."""
        return (self.source,)

    def tensor(self, values: Kernel) -> Tensor:
        """Row by row."""
        s_HTS = values[self.source]
        e_HTS = torch.exp(s_HTS - s_HTS.amax(-1, keepdim=True))
        return e_HTS / e_HTS.sum(-1, keepdim=True)

    def magnitude(self, values: Kernel, name: str, index: tuple[int, ...]) -> float:
        """The largest weight of the row; what is masked is 0 exactly."""
        hidden = self.scores.hides(*index[1:])
        return 0.0 if hidden else super().magnitude(values, name, index)

    def magnitudes(self, values: Kernel) -> Tensor:
        """A weight times the sizes of what its scores were added up from, for `e^` of them.

        The kernel never writes scores: what it rounds in them is in its weights.
        """
        return _uncertain(values[self.source], self.scores.magnitudes(values))

    def element(self, values: Kernel, index: tuple[int, ...]) -> Element:
        """The whole row of scores, their exponentials, and the share of one of them."""
        head, query, key = index
        reason = self.scores.hides(query, key)
        row = values[self.source][head, query].tolist()
        seen = [at for at in range(len(row)) if not self.scores.hides(query, at)]
        top = max(row[at] for at in seen)
        exps = {at: math.exp(row[at] - top) for at in seen}
        summed = math.fsum(exps.values())
        terms = tuple(
            Term(at=at, parts=(row[at], e, e / summed), value=e, label=values.texts[at])
            for at, e in exps.items()
        )
        cell = symbol("S", head, query, "s")
        columns = ("S", "e^(S − max)", "A")
        sum_ = Sum(formula=f"e^({cell} − max)", over="s", columns=columns, value=summed)
        peak = Fact(formula=f"max = max {cell} over s", parts=(), value=top)
        if reason:
            zero = Fact(formula="e^(−∞ − max) / Σ = 0 / {}", parts=(summed,), value=0.0)
            return Element(
                value=0.0, magnitude=0.0, note=reason, before=(peak,), sum=sum_, terms=terms,
                after=(zero,), follow=((self.source, index),),
            )  # fmt: skip
        value = exps[key] / summed
        share = Fact(
            formula=f"e^({symbol('S', *index)} − max) / Σ = {{}} / {{}}",
            parts=(exps[key], summed),
            value=value,
        )
        magnitude = float(self.row_magnitudes(values, head, query)[key])
        return Element(
            value=value, magnitude=magnitude, before=(peak,), sum=sum_, terms=terms, after=(share,),
            follow=((self.source, index),),
        )  # fmt: skip

    def row_magnitudes(self, values: Kernel, head: int, query: int) -> Tensor:
        """Those of one row, `[S]`."""
        s_S, scores = values[self.source][head, query], self.scores
        k_Sd = values[scores.key][head // scores.group].abs()
        q_d = values[scores.query][head, query].abs()
        size_S = (k_Sd * q_d).sum(-1) * abs(scores.attention.scale)
        return _uncertain(s_S, size_S.masked_fill_(s_S == -math.inf, 0.0))


@dataclass(frozen=True, kw_only=True)
class Mix(Rule):
    """`C = A V`: for every query the values of all keys, each times its weight, `[H, T, e]`."""

    attention: AttentionConfig
    weights: Pattern
    pattern: str
    value: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Pattern and values."""
        return (self.pattern, self.value)

    def tensor(self, values: Kernel) -> Tensor:
        """Head by head."""
        v_KSe = values.every(self.value)
        group = self.attention.heads // self.attention.kv_heads
        return torch.stack(
            [
                torch.einsum("ts,se->te", a_TS, v_KSe[head // group])
                for head, a_TS in enumerate(values[self.pattern])
            ]
        )

    def magnitudes(self, values: Kernel) -> Tensor:
        """What the weights may be off, times the values: a fused kernel writes neither S nor A."""
        group = self.attention.heads // self.attention.kv_heads
        v_HSe = values.every(self.value).abs().repeat_interleave(group, 0)
        return torch.einsum("hts,hse->hte", self.weights.magnitudes(values), v_HSe)

    def halves(self, values: Kernel, result: Tensor) -> Tensor:
        """The weights too: the fused kernel rounds them before they meet the values.

        A weight below what float16 holds in full is rounded as coarsely as the least that it does.
        """
        group = self.attention.heads // self.attention.kv_heads
        v_HSe = values.every(self.value).abs().repeat_interleave(group, 0)
        a_HtS = values[self.pattern]
        least = torch.finfo(values.model.dtype).tiny
        rounded_HtS = torch.where(a_HtS > 0, a_HtS + least, 0.0)
        return result.abs() + torch.einsum("hts,hse->hte", rounded_HtS, v_HSe)

    def element(self, values: Kernel, index: tuple[int, ...]) -> Element:
        """One weight and one value for every key with a weight."""
        head, query, i = index
        shared = head // (self.attention.heads // self.attention.kv_heads)
        weights = values[self.pattern][head, query].tolist()
        numbers = values[self.value][shared, :, i].tolist()
        terms = tuple(
            Term(at=at, parts=(a, v), value=a * v, label=values.texts[at])
            for at, (a, v) in enumerate(zip(weights, numbers, strict=True))
            if at <= query
        )
        columns = (symbol("A", head, query, "s"), symbol("V", shared, "s", i))
        value = total(terms)
        at = largest(terms).at
        off_S = self.weights.row_magnitudes(values, head, query)
        return Element(
            value=value,
            magnitude=float((off_S * values[self.value][shared, :, i].abs()).sum()),
            note=_shared(self.attention, head),
            sum=dot(columns, value, over="s"),
            terms=terms,
            follow=((self.pattern, (head, query, at)), (self.value, (shared, at, i))),
        )


def _uncertain(s: Tensor, size: Tensor) -> Tensor:
    """What `[…, S]` weights may be off, in eps, where scores `s` were added up from `size`.

    A weight is wrong by its own share of what its score and its sum are wrong: e^x(1 + dx).
    """
    below = torch.where(s == -math.inf, 0.0, s.amax(-1, keepdim=True) - s)
    a, off = s.softmax(-1), size + below
    return a * (1 + off + (a * off).sum(-1, keepdim=True))


def is_usual(attention: AttentionConfig) -> bool:
    """Whether scores are divided by the root of a head's size, as nearly everywhere."""
    return math.isclose(attention.scale, attention.head_dim**-0.5, rel_tol=1e-12)


def _shared(attention: AttentionConfig, head: int) -> str:
    group = attention.heads // attention.kv_heads
    if group == 1:
        return ""
    first = head // group * group
    return (
        f"heads {first} to {first + group - 1} share the keys and values of kv head {head // group}"
    )
