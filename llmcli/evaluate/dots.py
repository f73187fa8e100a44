"""Sums of products: the base of their rules, and those with a matrix, experts, a convolution.

Letters: T tokens, K numbers of a row (of chosen experts: the experts), N columns, D width, H heads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.config.formats import RUN
from llmcli.evaluate.numbers import Number, Of, clip, fact
from llmcli.evaluate.rule import (
    AnyOp,
    Axis,
    Numbers,
    Reader,
    Row,
    Rule,
    concatenated,
    largest,
    ordinal,
)
from llmcli.graph import ops, routing
from llmcli.records.explanation import Fact

_NUMBERS = 1 << 22  # of a matrix, copied to float64 at a time: 32 MiB


class Contraction(Rule[AnyOp]):
    """Sums of products whose bound is the same sum of absolute values: `_contract` makes both."""

    @abstractmethod
    def _contract(self, values: Numbers, of: Of) -> Tensor:
        """The activation made of `of(x)`, x or |x|, for every operand x, the bias included."""

    def tensor(self, values: Numbers) -> Tensor:
        """All sums."""
        return self._contract(values, lambda x: x)

    def magnitudes(self, values: Numbers) -> Tensor:
        """Σ|products| + |bias|."""
        return self._contract(values, torch.abs)

    def bound(self, values: Numbers, index: tuple[int, ...]) -> float:
        """Σ|products| + |bias| of one number, from its own rows."""
        read = Reader(self, values, index)
        self._compute(read)
        return read.size


class Project(Contraction[ops.Project]):
    """`Q = T¹ W_q + b_q`: every number is a row times a column, plus a bias."""

    def _contract(self, values: Numbers, of: Of) -> Tensor:
        """All rows times all columns, `[T, N]` or `[H, T, d]`."""
        x_TK = of(values.read(self.op.source, self.op.weight))
        parts = [torch.einsum("tk,kn->tn", x_TK, w) for w in _blocks(values, self.op.weight, of)]
        out_TN = torch.cat(parts, dim=1)
        if self.op.bias is not None:
            out_TN = out_TN + of(values.vector(self.op.bias))
        return torch.stack(out_TN.chunk(self.op.heads, -1)) if self.op.heads else out_TN

    def tensor(self, values: Numbers) -> Tensor:
        """All sums, clipped if the op says so."""
        found, limit = super().tensor(values), self.op.clip
        return found if limit is None else found.clamp(-limit, limit)

    def halves(self, values: Numbers, result: Tensor) -> Tensor:
        """Including the rounding of residual stream rows before the product."""
        found = super().halves(values, result)
        return found + self.magnitudes(values) if self.rules[self.op.source].node.wide else found

    def _compute(self, read: Reader) -> Number:
        op, values, (*head, token, column) = self.op, read.values, read.index
        if head:
            wide = values.size(op.weight)[1] // op.heads
            place = f"{head[0]} · {wide} + {column} ({op.head} {head[0]}, number {column})"
            column += head[0] * wide
            read.note = f"{self.letter_of(op.weight)}: column {column} = {place}"
        x_K = values.read(op.source, op.weight)[token]
        w_K = values.columns(op.weight, slice(column, column + 1))[:, 0]
        made = read.dot(
            read.row(op.source, token, Axis(), x=x_K, note=in_bits(values, op.weight)),
            read.row(op.weight, Axis(), column, x=w_K),
            read.stored(op.bias, column) if op.bias else None,
        )
        at = largest(read.terms).at
        x = values[op.source]
        if x.ndim == 3:
            size = x.shape[2]
            read.follow = [(op.source, (at // size, token, at % size))]
            read.note = read.note or (
                f"{self.letter_of(op.source)} with its heads side by side: "
                f"i = head · {size} + number, as {at} = {at // size} · {size} + {at % size}"
            )
        if bits := values.rounded(op.weight):
            read.before = self._rounding(bits, concatenated(x)[token], float(x_K[at]), token, at)
        return made if op.clip is None else clip(made.line(), -op.clip, op.clip)

    def _rounding(
        self, bits: int, row_K: Tensor, seen: float, token: int, at: int
    ) -> tuple[Fact, ...]:
        """The rounding of a number of the input row, which the product reads as `seen`."""
        first, x = at - at % RUN, float(row_K[at])
        largest_x = float(row_K[first : first + RUN].abs().max())
        by = 127 if bits == 8 else 127 * 256
        d = largest_x / by
        row, run = self.cell(self.op.source, token, "i"), f"i = {first} … {first + RUN - 1}"
        read = f"{self.cell(self.op.source, token, at)} in {bits} bits"
        parts = (x, x / d, float(round(seen / d))) if d else (x, 0.0, 0.0)
        return (
            fact(f"δ = max |{row}| / {by} over {run} = {{}} / {by}", d, largest_x),
            fact(f"{read}: {{}} / δ = {{}} is rounded, {{}} · δ", seen, *parts),
        )


class HeadShare(Contraction[ops.HeadShare]):
    """`C W_o`, head by head: the contribution of one head to the attention output, `[H, T, D]`."""

    def _contract(self, values: Numbers, of: Of) -> Tensor:
        """Each head times its rows of the matrix."""
        z_THe, parts = of(self._read(values)), []
        for w_KD in _blocks(values, self.op.weight, of):
            w_HeD = w_KD.view(*z_THe.shape[1:], -1)
            parts.append(torch.einsum("the,hed->htd", z_THe, w_HeD))
        return torch.cat(parts, dim=-1)

    def _read(self, values: Numbers) -> Tensor:
        """The heads' results as read by the product, `[T, H, e]`."""
        z_TK = values.read(self.op.source, self.op.weight)
        return z_TK.view(len(z_TK), len(values[self.op.source]), -1)

    def _compute(self, read: Reader) -> Number:
        op, values, (head, token, i) = self.op, read.values, read.index
        z_e = self._read(values)[token, head]
        first = head * len(z_e)
        w_e = values.columns(op.weight, slice(i, i + 1))[first : first + len(z_e), 0]
        return read.dot(
            read.row(op.source, head, token, Axis(), x=z_e, note=in_bits(values, op.weight)),
            read.row(op.weight, Axis(first=first), i, x=w_e),
        )


class ExpertProject(Contraction[routing.ExpertProject]):
    """`G[k] = X W[e_k] + b[e_k]`: each row times the matrix of its expert, `[K, T, N]`."""

    def _contract(self, values: Numbers, of: Of) -> Tensor:
        """Expert by expert."""
        chosen_KT = values[self.op.chosen].long().t()
        x_KTM = of(self._read(values, len(chosen_KT)))
        bias_EN = None if self.op.bias is None else of(values.vector(self.op.bias))
        made: dict[int, Tensor] = {}
        for expert in sorted(set(chosen_KT.flatten().tolist())):
            made[expert] = x_KTM[chosen_KT == expert] @ of(values.expert(self.op.weight, expert))
            if bias_EN is not None:
                made[expert] = made[expert] + bias_EN[expert]
        columns = next(iter(made.values())).shape[-1]
        out_KTN = x_KTM.new_zeros(*chosen_KT.shape, columns)
        for expert, rows in made.items():
            out_KTN[chosen_KT == expert] = rows
        return out_KTN

    def _compute(self, read: Reader) -> Number:
        op, values, (place, token, column) = self.op, read.values, read.index
        expert = int(values[op.chosen][token, place])
        read.note = f"the {ordinal(place)} choice of token {token} is expert {expert}"
        x_M = self._read(values, values[op.chosen].shape[-1])[place, token]
        w_M = values.expert(op.weight, expert)[:, column]
        row = (token,) if op.by_token else (place, token)
        made = read.dot(
            read.row(op.source, *row, Axis(), x=x_M, note=in_bits(values, op.weight)),
            read.row(op.weight, expert, Axis(), column, x=w_M),
            read.stored(op.bias, expert, column) if op.bias else None,
        )
        read.follow.append((op.chosen, (token, place)))
        return made

    def _read(self, values: Numbers, count: int) -> Tensor:
        """The rows as read by the products, `[K, T, M]`."""
        x = values.read(self.op.source, self.op.weight)
        return x.expand(count, *x.shape) if self.op.by_token else torch.stack(x.chunk(count, -1))


class SumExperts(Contraction[routing.SumExperts]):
    """`Y = Σ_k g[k] · O[k] + Z`: weighted outputs of the chosen experts plus the shared one."""

    def _contract(self, values: Numbers, of: Of) -> Tensor:
        """Expert by expert."""
        out_KTD = of(values[self.op.value])
        if self.op.share is not None:
            out_KTD = of(values[self.op.share]).t()[..., None] * out_KTD
        out_TD = out_KTD.sum(0)
        return out_TD if self.op.also is None else out_TD + of(values[self.op.also])

    def _compute(self, read: Reader) -> Number:
        op, values, (token, i), k = self.op, read.values, read.index, Axis(over="k")
        outputs = read.row(op.value, k, token, i)
        shares = Row(numbers=[1.0] * len(outputs.numbers), words="1", over="k")
        if op.share is not None:
            shares = read.row(op.share, token, k)
        also = None
        if op.also is not None:
            also = self.leaf(values[op.also][token, i], op.also, token, i)
        made = read.dot(shares, outputs, also)
        read.follow.reverse()  # an output leads before its weight
        if also is not None and op.also is not None:
            leads = abs(float(also.x)) > abs(largest(read.terms).value)
            read.follow.insert(0 if leads else len(read.follow), (op.also, (token, i)))
        return made


class Convolve(Contraction[ops.Convolve]):
    """`Z[t] = Σ_j w[j] ∘ Y[t − L + 1 + j] + b`."""

    def _contract(self, values: Numbers, of: Of) -> Tensor:
        """Token by token, from the tokens in the windows of the requested positions."""
        length = self.op.length
        first = max(0, min(values.positions) - length + 1)
        rows_TD = of(values.every(self.op.source, slice(first, max(values.positions) + 1)))
        padded = F.pad(rows_TD, (0, 0, length - 1, 0))
        seen = torch.stack([padded[at - first : at - first + length] for at in values.positions])
        out_TD = (seen * of(values.vector(self.op.weight)).t()).sum(1)
        return out_TD if self.op.bias is None else out_TD + of(values.vector(self.op.bias))

    def _compute(self, read: Reader) -> Number:
        op, (token, i), length = self.op, read.index, self.op.length
        first = max(0, token - length + 1)
        unused = length - (token + 1 - first)  # weights before the first token
        w_j = read.values.vector(op.weight)[i, unused:]
        read.note = f"the weights of the last {length - unused} of {length} tokens"
        return read.dot(
            read.row(op.weight, i, Axis(over="j", first=unused), x=w_j),
            read.row(op.source, Axis(over="j", first=first, end=token + 1), i),
            read.stored(op.bias, i) if op.bias else None,
        )


def in_bits(values: Numbers, weight: str) -> str:
    """` in 16 bits` if products with this matrix round their input, else empty."""
    bits = values.rounded(weight)
    return f" in {bits} bits" if bits else ""


def _blocks(values: Numbers, name: str, of: Of) -> Iterator[Tensor]:
    """Yield `of` columns of a matrix in blocks: an output head may have 256k."""
    rows, columns = values.size(name)
    step = max(1, _NUMBERS // rows)
    for first in range(0, columns, step):
        yield of(values.columns(name, slice(first, first + step)))
