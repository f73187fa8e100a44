"""Sums of products: the base of their rules, and those with a matrix, experts, a convolution.

Letters: T tokens, K numbers of a row (of chosen experts: the experts), N columns, D width, H heads.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.config.formats import RUN
from llmcli.evaluate.numbers import Of, fact
from llmcli.evaluate.rule import AnyOp, Numbers, Rule, concatenated, exact, largest, ordinal, total
from llmcli.graph import ops, routing
from llmcli.records.explanation import Cell, Element, Fact, Sum, Term

_NUMBERS = 1 << 22  # of a matrix, copied to float64 at a time: 32 MiB


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Two rows of numbers and how formulas write them, with `over` as the running index.

    `inputs`: the numbers that the product at an index is made of, most important first. `labels`:
    of every index. `scale`: a factor, `bias`: a summand; the symbol and value of either.
    """

    x: Sequence[float]
    y: Sequence[float]
    cells: tuple[str, str]
    inputs: Callable[[int], tuple[Cell, ...]]
    over: str = "i"
    labels: Sequence[str] = ()
    scale: tuple[str, float] | None = None
    bias: tuple[str, float] | None = None
    note: str = ""

    @property
    def terms(self) -> tuple[Term, ...]:
        """The products."""
        return products(self.x, self.y, self.labels)


class Dot(Rule[AnyOp]):
    """Every number is a sum of products of two rows, its `_operands`."""

    @abstractmethod
    def _operands(self, values: Numbers, index: tuple[int, ...]) -> Operands:
        """The rows of the number at `index`."""

    def _finish(self, found: Operands, index: tuple[int, ...], summed: float) -> tuple[Fact, ...]:
        """The lines from the sum to the number: the scale or the bias, if there is one."""
        if found.scale is not None:
            cell, factor = found.scale
            return (fact(f"{cell} · Σ = {{}} · {{}}", summed * factor, factor, summed),)
        if found.bias is None:
            return ()
        cell, b = found.bias
        return (fact(f"Σ + {cell} = {{}} + {{}}", summed + b, summed, b),)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The products and their sum."""
        found = self._operands(values, index)
        terms = found.terms
        summed = total(terms)
        after = self._finish(found, index, summed)
        return Element(
            value=after[-1].value if after else summed,
            note=found.note,
            sum=dot(found.cells, summed, found.over),
            terms=terms,
            after=after,
            follow=found.inputs(largest(terms).at),
        )


class Contraction(Dot[AnyOp]):
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
        found = self._operands(values, index)
        absolute = math.fsum(abs(term.value) for term in found.terms)
        return absolute + (abs(found.bias[1]) if found.bias else 0.0)


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

    def _finish(self, found: Operands, index: tuple[int, ...], summed: float) -> tuple[Fact, ...]:
        """The bias, and the clipping."""
        lines, limit = super()._finish(found, index, summed), self.op.clip
        if limit is None:
            return lines
        x = lines[-1].value if lines else summed
        return (*lines, fact(f"clip({{}}, ±{limit:g})", max(-limit, min(x, limit)), x))

    def halves(self, values: Numbers, result: Tensor) -> Tensor:
        """Including the rounding of residual stream rows before the product."""
        found = super().halves(values, result)
        return found + self.magnitudes(values) if self.rules[self.op.source].node.wide else found

    def _operands(self, values: Numbers, index: tuple[int, ...]) -> Operands:
        """The row of a token and a column of the matrix."""
        op, (*head, token, column), note = self.op, index, ""
        if head:
            wide = values.size(op.weight)[1] // op.heads
            place = f"{head[0]} · {wide} + {column} ({op.head} {head[0]}, number {column})"
            column += head[0] * wide
            note = f"{self.letter_of(op.weight)}: column {column} = {place}"
        x = values[op.source]

        def inputs(at: int) -> tuple[Cell, ...]:
            if x.ndim == 2:
                return ((op.source, (token, at)),)
            return ((op.source, (at // x.shape[2], token, at % x.shape[2])),)

        return Operands(
            x=values.read(op.source, op.weight)[token].tolist(),
            y=values.columns(op.weight, slice(column, column + 1))[:, 0].tolist(),
            cells=(
                self.cell(op.source, token, "i") + in_bits(values, op.weight),
                self.cell(op.weight, "i", column),
            ),
            inputs=inputs,
            bias=self.bias(values, op.bias, column),
            note=note,
        )

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The dot product; where the largest product's input is of a head, and how it is read."""
        element, x = super().element(values, index), values[self.op.source]
        at, note = largest(element.terms).at, element.note
        if x.ndim == 3 and not note:
            wide = x.shape[2]
            note = (
                f"{self.letter_of(self.op.source)} with its heads side by side: "
                f"i = head · {wide} + number, as {at} = {at // wide} · {wide} + {at % wide}"
            )
        return replace(element, note=note, before=self._rounding(values, index[-2], at))

    def _rounding(self, values: Numbers, token: int, at: int) -> tuple[Fact, ...]:
        """The rounding of an input number by the product, if it is rounded."""
        if not (bits := values.rounded(self.op.weight)):
            return ()
        row_K = concatenated(values[self.op.source])[token]
        first, x = at - at % RUN, float(row_K[at])
        largest_x = float(row_K[first : first + RUN].abs().max())
        seen = float(values.read(self.op.source, self.op.weight)[token, at])
        by = 127 if bits == 8 else 127 * 256
        d = largest_x / by
        row, run = self.cell(self.op.source, token, "i"), f"i = {first} … {first + RUN - 1}"
        read = f"{self.cell(self.op.source, token, at)}{in_bits(values, self.op.weight)}"
        parts = (x, x / d, float(round(seen / d))) if d else (x, 0.0, 0.0)
        return (
            fact(f"d = max |{row}| / {by} over {run} = {{}} / {by}", d, largest_x),
            fact(f"{read}: {{}} / d = {{}} is rounded, {{}} · d", seen, *parts),
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

    def _operands(self, values: Numbers, index: tuple[int, ...]) -> Operands:
        """The numbers of the head, and its rows of a column."""
        head, token, i = index
        z_e = self._read(values)[token, head].tolist()
        first = head * len(z_e)
        column_K = values.columns(self.op.weight, slice(i, i + 1))[:, 0]
        cell = self.cell(self.op.source, head, token, "i") + in_bits(values, self.op.weight)
        return Operands(
            x=z_e,
            y=column_K[first : first + len(z_e)].tolist(),
            cells=(cell, self.cell(self.op.weight, f"{first}+i" if first else "i", i)),
            inputs=lambda at: ((self.op.source, (head, token, at)),),
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

    def _operands(self, values: Numbers, index: tuple[int, ...]) -> Operands:
        """The row, and a column of the expert's matrix."""
        op, (place, token, column) = self.op, index
        expert = int(values[op.chosen][token, place])
        row = (token,) if op.by_token else (place, token)
        cell = self.cell(op.source, *row, "i") + in_bits(values, op.weight)
        return Operands(
            x=self._read(values, values[op.chosen].shape[-1])[place, token].tolist(),
            y=values.expert(op.weight, expert)[:, column].tolist(),
            cells=(cell, self.cell(op.weight, expert, "i", column)),
            inputs=lambda at: ((op.source, (*row, at)), (op.chosen, (token, place))),
            bias=self.bias(values, op.bias, expert, column),
            note=f"the {ordinal(place)} choice of token {token} is expert {expert}",
        )

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

    def _operands(self, values: Numbers, index: tuple[int, ...]) -> Operands:
        """The experts' weights and outputs."""
        op, (token, i) = self.op, index
        outputs = values[op.value][:, token, i].tolist()
        bias: tuple[str, float] | None = None
        if op.also is not None:
            bias = self.cell(op.also, *index), float(values[op.also][index])

        def inputs(at: int) -> tuple[Cell, ...]:
            found: list[Cell] = [(op.value, (at, token, i))]
            found += [] if op.share is None else [(op.share, (token, at))]
            if op.also is not None and bias is not None:
                leads = abs(bias[1]) > abs(weights[at] * outputs[at])
                found.insert(0 if leads else len(found), (op.also, (token, i)))
            return tuple(found)

        weights, weight = [1.0] * len(outputs), "1"
        if op.share is not None:
            weights, weight = values[op.share][token].tolist(), self.cell(op.share, token, "k")
        return Operands(
            x=weights,
            y=outputs,
            cells=(weight, self.cell(op.value, "k", token, i)),
            inputs=inputs,
            over="k",
            bias=bias,
        )


class Convolve(Contraction[ops.Convolve]):
    """`Z[t] = Σ_j w[j] ∘ Y[t − L + 1 + j] + b`."""

    def _contract(self, values: Numbers, of: Of) -> Tensor:
        """Token by token, from the tokens in the windows of the requested positions."""
        length = self.op.length
        first = max(0, min(values.positions) - length + 1)
        rows_TD = of(values.every(self.op.source, slice(first, max(values.positions) + 1)))
        padded = F.pad(rows_TD, (0, 0, length - 1, 0))
        seen = torch.stack([padded[at - first : at - first + length] for at in values.positions])
        out_TD = (seen * of(exact(values.weight(self.op.weight))).t()).sum(1)
        return out_TD if self.op.bias is None else out_TD + of(values.vector(self.op.bias))

    def _operands(self, values: Numbers, index: tuple[int, ...]) -> Operands:
        """The weights of the tokens in the window, and these."""
        op, (token, i), length = self.op, index, self.op.length
        first = max(0, token - length + 1)
        rows = values.every(op.source)[first : token + 1, i].tolist()
        unused = length - len(rows)  # weights before the first token
        return Operands(
            x=exact(values.weight(op.weight))[i, unused:].tolist(),
            y=rows,
            cells=(
                self.cell(op.weight, i, f"{unused}+j" if unused else "j"),
                self.cell(op.source, f"{first}+j" if first else "j", i),
            ),
            inputs=lambda at: ((op.source, (first + at, i)),),
            over="j",
            bias=self.bias(values, op.bias, i),
            note=f"the weights of the last {len(rows)} of {length} tokens",
        )


def products(
    x: Sequence[float], y: Sequence[float], labels: Sequence[str] = ()
) -> tuple[Term, ...]:
    """The terms of a dot product."""
    rows = zip(x, y, labels or [""] * len(x), strict=True)
    return tuple(
        Term(at=at, parts=(a, b), value=a * b, label=label) for at, (a, b, label) in enumerate(rows)
    )


def dot(cells: tuple[str, str], value: float, over: str = "i") -> Sum:
    """The sum of products of numbers with these symbols."""
    return Sum(formula=" · ".join(cells), over=over, columns=(*cells, "product"), value=value)


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
