"""Rules of the products with chosen experts, and of their weighted sum.

Letters: T tokens, K chosen experts, M numbers of a row, N columns of a matrix, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.graph import routing
from llmcli.graph.evaluation.rule import (
    Numbers,
    Rule,
    dot,
    in_bits,
    largest,
    ordinal,
    products,
    size,
    total,
)
from llmcli.records.explanation import Element, Fact


class ExpertProject(Rule[routing.ExpertProject]):
    """`G[k] = X W[e_k] + b[e_k]`: each row times the matrix of its expert."""

    def tensor(self, values: Numbers) -> Tensor:
        """Expert by expert."""
        return self._product(values)

    def magnitudes(self, values: Numbers) -> Tensor:
        """|rows| times |columns|, plus |biases|."""
        return self._product(values, absolute=True)

    def _product(self, values: Numbers, *, absolute: bool = False) -> Tensor:
        chosen_KT = values[self.op.chosen].long().t()
        x_KTM = self._read(values, len(chosen_KT))
        bias_EN = None if self.op.bias is None else values.vector(self.op.bias)
        out_KTN: Tensor | None = None
        for expert in sorted(set(chosen_KT.flatten().tolist())):
            w_MN = values.expert(self.op.weight, expert)
            here_KT = chosen_KT == expert
            rows = x_KTM[here_KT]
            made = rows.abs() @ w_MN.abs() if absolute else rows @ w_MN
            if bias_EN is not None:
                made = made + (bias_EN[expert].abs() if absolute else bias_EN[expert])
            if out_KTN is None:
                out_KTN = made.new_zeros(*chosen_KT.shape, made.shape[-1])
            out_KTN[here_KT] = made
        assert out_KTN is not None
        return out_KTN

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """A dot product with a column of the expert's matrix."""
        place, token, column = index
        expert = int(values[self.op.chosen][token, place])
        row = (token,) if self.op.by_token else (place, token)
        x_M = self._read(values, values[self.op.chosen].shape[-1])[place, token]
        column_M = values.expert(self.op.weight, expert)[:, column]
        terms = products(x_M.tolist(), column_M.tolist())
        summed, b = total(terms), 0.0
        after: tuple[Fact, ...] = ()
        if self.op.bias is not None:
            b = float(values.vector(self.op.bias)[expert, column])
            cell = self.cell(self.op.bias, expert, column)
            after = (Fact(
                formula=f"Σ + {cell} = {{}} + {{}}", parts=(summed, b), value=summed + b
            ),)  # fmt: skip
        w = self.cell(self.op.weight, expert, "i", column)
        cells = (self.cell(self.op.source, *row, "i") + in_bits(values, self.op.weight), w)
        return Element(
            value=summed + b, magnitude=size(terms) + abs(b), sum=dot(cells, summed), terms=terms,
            after=after, note=f"the {ordinal(place)} choice of token {token} is expert {expert}",
            follow=((self.op.source, (*row, largest(terms).at)), (self.op.chosen, (token, place))),
        )  # fmt: skip

    def _read(self, values: Numbers, count: int) -> Tensor:
        """The rows as read by the products, `[K, T, M]`."""
        x = values.read(self.op.source, self.op.weight)
        return x.expand(count, *x.shape) if self.op.by_token else torch.stack(x.chunk(count, -1))


class SumExperts(Rule[routing.SumExperts]):
    """`Y = Σ_k g[k] · O[k] + Z`: weighted outputs of the chosen experts plus the shared one."""

    def tensor(self, values: Numbers) -> Tensor:
        """Expert by expert."""
        return self._summed(*(values[name] for name in self.op.inputs))

    def magnitudes(self, values: Numbers) -> Tensor:
        """Σ|terms|."""
        return self._summed(*(values[name].abs() for name in self.op.inputs))

    def _summed(
        self, weight_TK: Tensor, value_KTD: Tensor, also_TD: Tensor | None = None
    ) -> Tensor:
        out_TD = (weight_TK.t()[..., None] * value_KTD).sum(0)
        return out_TD if also_TD is None else out_TD + also_TD

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The experts' outputs, each times its weight."""
        token, i = index
        weights = values[self.op.share][token].tolist()
        outputs = values[self.op.value][:, token, i].tolist()
        terms = products(weights, outputs)
        summed, also = total(terms), 0.0
        after: tuple[Fact, ...] = ()
        most = largest(terms).at
        follow = [(self.op.value, (most, token, i)), (self.op.share, (token, most))]
        if self.op.also is not None:
            also = float(values[self.op.also][index])
            fact = Fact(
                formula=f"Σ + {self.cell(self.op.also, *index)} = {{}} + {{}}",
                parts=(summed, also), value=summed + also,
            )  # fmt: skip
            after = (fact,)
            follow.insert(0 if abs(also) > abs(terms[most].value) else 2, (self.op.also, index))
        columns = (self.cell(self.op.share, token, "k"), self.cell(self.op.value, "k", token, i))
        return Element(
            value=summed + also, magnitude=size(terms) + abs(also), terms=terms, after=after,
            sum=dot(columns, summed, "k"), follow=tuple(follow),
        )  # fmt: skip
