"""Rules of recurrences, token by token as in the papers.

Letters: T requested tokens, S all tokens, H heads, d numbers of a key, e of a value.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from llmcli.evaluate.numbers import Number, leaf
from llmcli.evaluate.rule import Axis, Numbers, Reader, Row, Rule
from llmcli.graph import recurrence as ops

# Tokens per chunk of the kernels: each number has rounding errors of its whole chunk.
CHUNK = 64


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


class LinearMap(Rule[ops.LinearMap]):
    """Row t backwards: r = q_t; A[t,s] = β_s rᵀk_s, then r ← e^(g_s) (r − β_s k_s (k_sᵀ r))."""

    def tensor(self, values: Numbers) -> Tensor:
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

    def _compute(self, read: Reader) -> Number:
        op, values, (head, t, s) = self.op.of, read.values, read.index
        if s > t:
            read.note = "the key comes after the query"
            return leaf(0.0, "")
        own, of = _Inputs(op, values), op.key_head(head)
        r_d = values.every(op.query)[of, t]
        for m in range(t, s, -1):
            k_d = own.k_HSd[head, m]
            if not op.plain:
                r_d = r_d - own.beta_HS[head, m] * (r_d @ k_d) * k_d
            r_d = r_d * own.g_HS[head, m].exp()
        taken = "the query, from which each token in between has taken its key, and decayed"
        read.note = f"r: {'the decayed query' if op.plain else taken}"
        summed = read.dot(
            replace(read.row(op.query, of, t, Axis(), x=r_d), words="r[i]"),
            read.row(op.key, of, s, Axis()),
        )
        return read.at(op.step, s, head) * summed


class StateAfter(Rule[ops.StateAfter]):
    """`S = e^g S[t−1] + β k (v − kᵀ e^g S[t−1])`, `[H, T, d·e]`."""

    def _each(self, values: Numbers, positions: tuple[int, ...]) -> list[Tensor]:
        """The states `[H, d, e]` after the tokens at `positions`; zeros after -1."""
        own, v_HSe = _Inputs(self.op.of, values), values.every(self.op.value)
        state_Hde = v_HSe.new_zeros(len(own.heads), own.k_HSd.shape[-1], self.op.columns)
        found = {-1: state_Hde}
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

    def _compute(self, read: Reader) -> Number:
        op, values, (head, t, at) = self.op.of, read.values, read.index
        d, e = divmod(at, self.op.columns)
        read.note = f"row {d} (of the key) and column {e} (of the value)"
        own, of = _Inputs(op, values), op.key_head(head)
        before_de = self._each(values, (t - 1,))[0][head]
        v = read.at(self.op.value, head, t, e)
        key, beta = read.at(op.key, of, t, d), read.at(op.step, t, head)
        left = leaf(math.exp(float(own.g_HS[head, t])), f"e^{self.cell(op.log_decay, t, head)}")
        old = f"{self.letter}[{head},{t - 1},{at}]" if t else "0"
        decayed = (left * leaf(float(before_de[d, e]), old)).line("decayed")
        read.before = decayed.lines
        if not op.plain:
            column = f"{left.words} {self.letter}[{head},{t - 1},{self.op.columns}i+{e}]"
            state = Row(numbers=(left.x * before_de[:, e]).tolist(), words=column)
            v = v - read.dot(read.row(op.key, of, t, Axis()), state)
            del read.follow[3:]  # what leads in the sum
        return replace(decayed, lines=()) + (beta * key * v).line("written")
