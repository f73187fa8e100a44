"""Rules of recurrences, token by token as in the papers.

Letters: T requested tokens, S all tokens, H heads, d numbers of a key, e of a value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmcli.graph import recurrence as ops
from llmcli.graph.evaluation.dots import Dot, Of, Operands, dot, products
from llmcli.graph.evaluation.rule import Numbers, Rule, exact, total
from llmcli.records.explanation import Element, Fact, Sum, Term

# Tokens per chunk of the kernels: each number has rounding errors of its whole chunk.
CHUNK = 64


class Cut(Rule[ops.Cut]):
    """`V = Z[…]`, cut into heads."""

    def tensor(self, values: Numbers) -> Tensor:
        """The selected numbers."""
        return _cut(self.op, values)

    def magnitudes(self, values: Numbers) -> Tensor:
        """Zero for a copy."""
        return torch.zeros(1, dtype=torch.float64)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """One number of the row."""
        head, token, i = index
        at = token, self.op.first + head * self.op.size + i
        value = float(values[self.op.source][at])
        fact = Fact(formula=self.cell(self.op.source, *at), parts=(), value=value)
        follow = ((self.op.source, at),)
        return Element(value=value, after=(fact,), follow=follow)


class UnitLength(Rule[ops.UnitLength]):
    """`Q = x / √(Σ x² + ε) · s`, head by head."""

    def tensor(self, values: Numbers) -> Tensor:
        """Row by row."""
        x = _cut(self.op.cut, values)
        return x / ((x * x).sum(-1, keepdim=True) + self.op.eps) ** 0.5 * self.op.scale

    def magnitudes(self, values: Numbers) -> Tensor:
        """The absolute results."""
        return self.tensor(values).abs()

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The squares of the head's numbers, the root, the quotient."""
        op, cut, (head, token, i) = self.op, self.op.cut, index
        row, first = _cut(cut, values)[head, token].tolist(), cut.first + head * cut.size
        terms = tuple(Term(at=at, parts=(x,), value=x * x) for at, x in enumerate(row))
        cell = self.cell(cut.source, token, f"{first}+i" if first else "i")
        summed = total(terms)
        length = math.sqrt(summed + op.eps)
        value = row[i] / length * op.scale
        own = self.cell(cut.source, token, first + i)
        scale = f" · {op.scale:.6g}" if op.scale != 1 else ""
        root = Fact(formula=f"ℓ = √(Σ + ε) = √({{}} + {op.eps:g})", parts=(summed,), value=length)
        quotient = Fact(
            formula=f"{own} / ℓ{scale} = {{}} / {{}}{scale}", parts=(row[i], length), value=value
        )
        return Element(
            value=value, terms=terms,
            sum=Sum(formula=f"{cell}²", over="i", columns=(cell, f"{cell}²"), value=summed),
            after=(root, quotient), follow=((cut.source, (token, first + i)),),
        )  # fmt: skip


class StepSize(Rule[ops.StepSize]):
    """`dt = clip(softplus(X + b), least, most)`, `[T, H]`."""

    def _inside(self, values: Numbers) -> Tensor:
        return values[self.op.source] + values.vector(self.op.bias)

    def tensor(self, values: Numbers) -> Tensor:
        """log(1 + e^x), number by number."""
        return _clipped(torch.logaddexp(self._inside(values), torch.zeros(())), self.op)

    def magnitudes(self, values: Numbers) -> Tensor:
        """The magnitudes of the softplus's argument and of its result."""
        x, b = values[self.op.source], values.vector(self.op.bias)
        # below −1 it is nearly e^x: relative error of x
        slope = torch.sigmoid(x + b)
        return (x.abs() + b.abs() + 1) * slope + self.tensor(values)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The bias, the softplus, the bounds."""
        op = self.op
        x, b = float(values[op.source][index]), float(values.vector(op.bias)[index[-1]])
        soft = float(torch.logaddexp(torch.tensor(x + b, dtype=torch.float64), torch.zeros(())))
        value = min(max(soft, op.least), op.most)
        cells = self.cell(op.source, *index), self.cell(op.bias, index[-1])
        facts = [
            Fact(formula=f"x = {cells[0]} + {cells[1]} = {{}} + {{}}", parts=(x, b), value=x + b),
            Fact(formula="softplus(x) = ln(1 + e^x)", parts=(), value=soft),
        ]
        if op.bounded:
            words = f"clip({{}}, {op.least:g}, {op.most:g})"
            facts.append(Fact(formula=words, parts=(soft,), value=value))
        return Element(
            value=value, after=tuple(facts),
            follow=((op.source, index),),
        )  # fmt: skip


class LogDecay(Rule[ops.LogDecay]):
    """`g = −e^A · dt`, `[T, H]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """The element-wise product."""
        return -torch.exp(values.vector(self.op.rate)) * values[self.op.source]

    def magnitudes(self, values: Numbers) -> Tensor:
        """The relative error of the exponential is that of A."""
        return self.tensor(values).abs() * (1 + values.vector(self.op.rate).abs())

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The rate and the step size; the remaining share of the state."""
        a, dt = float(values.vector(self.op.rate)[index[-1]]), float(values[self.op.source][index])
        value = -math.exp(a) * dt
        cells = self.cell(self.op.rate, index[-1]), self.cell(self.op.source, *index)
        facts = (
            Fact(formula=f"e^{cells[0]} = e^{{}}", parts=(a,), value=math.exp(a)),
            Fact(formula=f"−e^{cells[0]} · {cells[1]} = −{{}} · {{}}", parts=(math.exp(a), dt),
                 value=value),
            Fact(formula="e^g, what is left of the state", parts=(), value=math.exp(value)),
        )  # fmt: skip
        return Element(value=value, after=facts,
                       follow=((self.op.source, index),))  # fmt: skip


class _Inputs:
    """Inputs of all tokens: keys, β and log-decays of each head."""

    def __init__(self, op: ops.Recurrence, values: Numbers) -> None:
        heads = [op.key_head(head) for head in range(op.heads)]
        self.k_HSd = values.every(op.key)[heads]
        self.heads = heads
        self.beta_HS = values.every(op.step).t()
        self.g_HS = values.every(op.log_decay).t()

    def sizes_HTS(self, positions: tuple[int, ...]) -> Tensor:
        """Bound of the rounding error of token s's write in token t's read.

        The size e^(Σ g) β ‖k‖, times the number of tokens between, of a chunk, and of the decay's
        exponent: the delta rule never amplifies the state, so errors do not grow. 0 for later
        tokens.
        """
        sums_HS = self.g_HS.cumsum(-1)
        at_T = torch.tensor(positions)
        apart_HTS = sums_HS[:, at_T, None] - sums_HS[:, None, :]
        tokens = torch.arange(self.g_HS.shape[1])
        between_TS = at_T[:, None] - tokens
        apart_HTS = apart_HTS.masked_fill(between_TS < 0, -math.inf)
        written_HS = self.beta_HS.abs() * self.k_HSd.norm(dim=-1)
        roundings_HTS = between_TS + 2 * CHUNK + torch.nan_to_num(apart_HTS.abs(), posinf=0.0)
        found_HTS = apart_HTS.exp() * written_HS[:, None] * roundings_HTS
        # a fully decayed state is below the smallest number, but not 0
        least = torch.finfo(torch.float64).tiny
        return torch.where(between_TS < 0, 0.0, found_HTS.clamp_min(least))


class LinearMap(Dot[ops.LinearMap]):
    """Row t backwards: r = q_t; A[t,s] = β_s rᵀk_s, then r ← e^(g_s) (r − β_s k_s (k_sᵀ r))."""

    def contract(self, values: Numbers, of: Of) -> Tensor:
        """`[H, T, S]`, all rows at once."""
        own, op = _Inputs(self.op.of, values), self.op.of
        q_HTd = values[op.query][own.heads]
        at_T = torch.tensor(values.positions)
        r_HTd, columns = torch.zeros_like(q_HTd), []
        for s in reversed(range(own.g_HS.shape[1])):
            r_HTd = torch.where((at_T == s)[:, None], q_HTd, r_HTd)
            k_Hd1, beta_H1 = own.k_HSd[:, s, :, None], own.beta_HS[:, s, None]
            seen_HT = (r_HTd @ k_Hd1)[..., 0]
            columns.append(beta_H1 * seen_HT)
            if not op.plain:
                r_HTd = r_HTd - (beta_H1 * seen_HT)[..., None] * own.k_HSd[:, s, None]
            r_HTd = r_HTd * own.g_HS[:, s, None, None].exp()
        return torch.stack(columns[::-1], -1)

    def magnitudes(self, values: Numbers) -> Tensor:
        """`_Inputs.sizes_HTS`, times the lengths of the queries."""
        own = _Inputs(self.op.of, values)
        q_HT = values[self.op.of.query][own.heads].norm(dim=-1)
        found: Tensor = own.sizes_HTS(values.positions) * q_HT[..., None]
        return found

    bound = Rule.bound

    def operands(self, values: Numbers, index: tuple[int, ...]) -> Operands:
        """The remaining query and the key."""
        op, (head, t, s) = self.op.of, index
        own, of = _Inputs(op, values), op.key_head(head)
        r_d = values.every(op.query)[of, t]
        for m in range(t, s, -1):
            k_d = own.k_HSd[head, m]
            if not op.plain:
                r_d = r_d - own.beta_HS[head, m] * (r_d @ k_d) * k_d
            r_d = r_d * own.g_HS[head, m].exp()
        taken = "the query, from which each token in between has taken its key, and decayed"
        return Operands(
            x=r_d.tolist(),
            y=own.k_HSd[head, s].tolist(),
            cells=("r[i]", self.cell(op.key, of, s, "i")),
            inputs=lambda at: (
                (op.query, (of, t, at)), (op.key, (of, s, at)), (op.step, (s, head)),
            ),
            note=f"r: {'the decayed query' if op.plain else taken}",
            scale=(self.cell(op.step, s, head), float(own.beta_HS[head, s])),
        )  # fmt: skip

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """A dot product of the remaining query and the key, times β; or 0."""
        if index[2] > index[1]:
            return Element(value=0.0, note="the key comes after the query")
        return super().element(values, index)


class StateAfter(Rule[ops.StateAfter]):
    """`S = e^g S[t−1] + β k (v − kᵀ e^g S[t−1])`, `[H, T, d·e]`."""

    def _after(self, values: Numbers, tokens: int) -> Tensor:
        """The state after `tokens` tokens, `[H, d, e]`; the last one of `_each`."""
        return self._each(values, (tokens - 1,))[0] if tokens else self._none(values)

    def _none(self, values: Numbers) -> Tensor:
        op = self.op
        rows = values.every(op.of.key).shape[-1]
        return torch.zeros(op.of.heads, rows, op.columns, dtype=torch.float64)

    def _each(self, values: Numbers, positions: tuple[int, ...]) -> list[Tensor]:
        own = _Inputs(self.op.of, values)
        v_HSe, state_Hde, found = values.every(self.op.value), self._none(values), {}
        for s in range(max(positions) + 1):
            state_Hde = state_Hde * own.g_HS[:, s, None, None].exp()
            k_Hd1, written_H1e = own.k_HSd[:, s, :, None], v_HSe[:, s, None]
            if not self.op.of.plain:
                written_H1e = written_H1e - k_Hd1.mT @ state_Hde
            state_Hde = state_Hde + own.beta_HS[:, s, None, None] * k_Hd1 * written_H1e
            if s in positions:
                found[s] = state_Hde
        return [found[s] for s in positions]

    def tensor(self, values: Numbers) -> Tensor:
        """Token by token."""
        return torch.stack([one.flatten(1) for one in self._each(values, values.positions)], 1)

    def magnitudes(self, values: Numbers) -> Tensor:
        """`_Inputs.sizes_HTS`, times the sizes of the values, equal within a column."""
        sizes_HTS = _Inputs(self.op.of, values).sizes_HTS(values.positions)
        found_HTe = sizes_HTS @ values.every(self.op.value).abs()
        # reads have the magnitude of all rows, like the product that is subtracted
        return found_HTe.repeat(1, 1, values.every(self.op.of.key).shape[-1])

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The decayed state, its read by the key, and the write."""
        op, (head, t, at) = self.op.of, index
        d, e = divmod(at, self.op.columns)
        own, of = _Inputs(op, values), op.key_head(head)
        before_de = self._after(values, t)[head]
        left = math.exp(float(own.g_HS[head, t]))
        k_d, beta = own.k_HSd[head, t].tolist(), float(own.beta_HS[head, t])
        v = float(values.every(self.op.value)[head, t, e])
        decayed = left * float(before_de[d, e])
        cells = {
            "g": self.cell(op.log_decay, t, head), "k": self.cell(op.key, of, t, d),
            "v": self.cell(self.op.value, head, t, e), "b": self.cell(op.step, t, head),
        }  # fmt: skip
        old = f"{self.letter}[{head},{t - 1},{at}]" if t else "0"
        facts = [Fact(formula=f"decayed: e^{cells['g']} · {old} = {{}} · {{}}",
                      parts=(left, float(before_de[d, e])), value=decayed)]  # fmt: skip
        terms: tuple[Term, ...] = ()
        read, new = 0.0, v
        if not op.plain:
            read_d = (left * before_de[:, e]).tolist()
            terms = products(k_d, read_d)
            read = total(terms)
            new = v - read
        words = cells["v"] if op.plain else f"({cells['v']} − Σ)"
        numbers = "{}" if op.plain else "({} − {})"
        parts = (beta, k_d[d], v) if op.plain else (beta, k_d[d], v, read)
        written = beta * k_d[d] * new
        write = Fact(formula=f"written: {cells['b']} · {cells['k']} · {words} = {{}} · {{}} · "
                     + numbers, parts=parts, value=written)  # fmt: skip
        both = Fact(formula="decayed + written = {} + {}", parts=(decayed, written),
                    value=decayed + written)  # fmt: skip
        read_of = f"e^{cells['g']} {self.letter}[{head},{t - 1},{self.op.columns}i+{e}]"
        keys = (self.cell(op.key, of, t, "i"), read_of)
        return Element(
            value=decayed + written,
            note=f"row {d} (of the key) and column {e} (of the value)",
            before=tuple(facts), terms=terms, sum=dot(keys, read) if terms else None,
            after=(write, both),
            follow=((self.op.value, (head, t, e)), (op.key, (of, t, d)), (op.step, (t, head))),
        )  # fmt: skip


class Skip(Rule[ops.Skip]):
    """`Y = C + D X`, `[H, T, d]`."""

    def _weights(self, values: Numbers) -> Tensor:
        return exact(values.weight(self.op.weight))[:, None, None]

    def tensor(self, values: Numbers) -> Tensor:
        """Head by head."""
        return values[self.op.source] + self._weights(values) * values[self.op.value]

    def magnitudes(self, values: Numbers) -> Tensor:
        """|C| + |D X|."""
        skipped = self._weights(values).abs() * values[self.op.value].abs()
        return values[self.op.source].abs() + skipped

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """Both terms."""
        y, x = float(values[self.op.source][index]), float(values[self.op.value][index])
        weight = float(values.weight(self.op.weight)[index[0]])
        value = y + weight * x
        cells = self.cell(self.op.source, *index), self.cell(self.op.value, *index)
        own = self.cell(self.op.weight, index[0])
        fact = Fact(formula=f"{cells[0]} + {own} · {cells[1]} = {{}} + {{}} · {{}}",
                    parts=(y, weight, x), value=value)  # fmt: skip
        return Element(value=value, after=(fact,),
                       follow=((self.op.source, index), (self.op.value, index)))  # fmt: skip


def _clipped(x: Tensor, op: ops.StepSize) -> Tensor:
    x = torch.where(x < op.least, op.least, x)
    return torch.where(x > op.most, op.most, x)


def _cut(op: ops.Cut, values: Numbers) -> Tensor:
    """The selected numbers as heads, `[H, T, d]`."""
    rows_TC = values[op.source][:, op.first : op.first + op.heads * op.size]
    return torch.stack(rows_TC.chunk(op.heads, -1))
