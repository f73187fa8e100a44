"""Rules of softmax attention, cell by cell: scores with their mask, softmax, `A V`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmcli.config import AttentionConfig
from llmcli.explain.rule import Element, Rule, dot, largest, products, symbol, total
from llmcli.reports.explanation import Fact, Sum, Term

if TYPE_CHECKING:
    from llmcli.explain.values import Values


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

    def magnitude(self, values: Values, name: str, index: tuple[int, ...]) -> float:
        """A score can be small because large products cancel: ‖q‖ · ‖k‖ · scale bounds them."""
        head, query, _ = index
        q_d = values.kernel(self.query)[head, query]
        k_Sd = values.kernel(self.key)[head // self.group, : query + 1]
        return float(q_d.norm() * k_Sd.norm(dim=1).max()) * abs(self.attention.scale)

    def tensor(self, values: Values) -> Tensor:
        """Head by head."""
        q_HTd, k_KSd = values[self.query], values[self.key]
        tokens = q_HTd.shape[1]
        at_T = torch.arange(tokens)
        hidden_TS = at_T[None, :] > at_T[:, None]
        if self.attention.window is not None:
            hidden_TS = hidden_TS | (at_T[:, None] - at_T[None, :] >= self.attention.window)
        heads = [
            torch.einsum("td,sd->ts", q_Td, k_KSd[head // self.group]) * self.attention.scale
            for head, q_Td in enumerate(q_HTd)
        ]
        return torch.stack(heads).masked_fill(hidden_TS, -math.inf)

    def element(self, values: Values, index: tuple[int, ...]) -> Element:
        """A dot product of a query and a key, scaled; or −∞."""
        head, query, key = index
        reason = self.hides(query, key)
        if reason:
            return Element(value=-math.inf, note=reason)
        shared = head // self.group
        terms = products(
            values[self.query][head, query].tolist(), values[self.key][shared, key].tolist()
        )
        summed = total(terms)
        columns = (
            symbol(self.query_letter, head, query, "i"), symbol(self.key_letter, shared, key, "i")
        )
        size = self.attention.head_dim
        value = summed * self.attention.scale
        usual = is_usual(self.attention)
        scaled = Fact(
            formula=f"Σ / √{size} = {{}} / {{}}" if usual else "Σ · scale = {} · {}",
            parts=(summed, math.sqrt(size) if usual else self.attention.scale),
            value=value,
        )
        at = largest(terms).at
        return Element(
            value=value,
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

    def tensor(self, values: Values) -> Tensor:
        """Row by row."""
        s_HTS = values[self.source]
        e_HTS = torch.exp(s_HTS - s_HTS.amax(-1, keepdim=True))
        return e_HTS / e_HTS.sum(-1, keepdim=True)

    def element(self, values: Values, index: tuple[int, ...]) -> Element:
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
                value=0.0, note=reason, before=(peak,), sum=sum_, terms=terms,
                after=(zero,), follow=((self.source, index),),
            )  # fmt: skip
        value = exps[key] / summed
        share = Fact(
            formula=f"e^({symbol('S', *index)} − max) / Σ = {{}} / {{}}",
            parts=(exps[key], summed),
            value=value,
        )
        return Element(
            value=value, before=(peak,), sum=sum_, terms=terms, after=(share,),
            follow=((self.source, index),),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mix(Rule):
    """`C = A V`: for every query the values of all keys, each times its weight, `[H, T, e]`."""

    attention: AttentionConfig
    pattern: str
    value: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Pattern and values."""
        return (self.pattern, self.value)

    def tensor(self, values: Values) -> Tensor:
        """Head by head."""
        v_KSe = values[self.value]
        group = self.attention.heads // self.attention.kv_heads
        return torch.stack(
            [
                torch.einsum("ts,se->te", a_TS, v_KSe[head // group])
                for head, a_TS in enumerate(values[self.pattern])
            ]
        )

    def element(self, values: Values, index: tuple[int, ...]) -> Element:
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
        return Element(
            value=value,
            note=_shared(self.attention, head),
            sum=dot(columns, value, over="s"),
            terms=terms,
            follow=((self.pattern, (head, query, at)), (self.value, (shared, at, i))),
        )


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
