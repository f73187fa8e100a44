"""The rule of a causal depthwise convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.graph import ops
from llmcli.graph.evaluation.rule import (
    Numbers,
    Rule,
    dot,
    exact,
    largest,
    products,
    size,
    total,
)
from llmcli.records.explanation import Element, Fact


class Convolve(Rule[ops.Convolve]):
    """`Z[t] = Σ_j w[j] ∘ Y[t − L + 1 + j] + b`."""

    def tensor(self, values: Numbers) -> Tensor:
        """Token by token."""
        return self._summed(values)

    def magnitudes(self, values: Numbers) -> Tensor:
        """Σ|terms| + |bias|."""
        return self._summed(values, absolute=True)

    def _filter(self, values: Numbers) -> Tensor:
        return exact(values.weight(self.op.weight))

    def _summed(self, values: Numbers, *, absolute: bool = False) -> Tensor:
        length, w_DL = self.op.length, self._filter(values)
        # only the tokens in the window of the requested positions
        first = max(0, min(values.positions) - length + 1)
        rows_TD = values.every(self.op.source, slice(first, max(values.positions) + 1))
        if absolute:
            rows_TD, w_DL = rows_TD.abs(), w_DL.abs()
        padded = F.pad(rows_TD, (0, 0, length - 1, 0))
        seen = torch.stack([padded[at - first : at - first + length] for at in values.positions])
        out_TD = (seen * w_DL.t()).sum(1)
        if self.op.bias is None:
            return out_TD
        bias_D = values.vector(self.op.bias)
        return out_TD + (bias_D.abs() if absolute else bias_D)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The tokens of the window, each times its weight."""
        token, i = index
        length, first = self.op.length, max(0, token - self.op.length + 1)
        rows = values.every(self.op.source)[first : token + 1, i].tolist()
        weights = self._filter(values)[i, length - len(rows) :].tolist()
        terms = products(weights, rows)
        b = 0.0 if self.op.bias is None else float(values.weight(self.op.bias)[i])
        value = total(terms) + b
        unused = length - len(rows)  # weights before the first token
        w = self.cell(self.op.weight, i, f"{unused}+j" if unused else "j")
        y = self.cell(self.op.source, f"{first}+j" if first else "j", i)
        after = (Fact(formula="Σ + b = {} + {}", parts=(value - b, b), value=value),) if b else ()
        return Element(
            value=value, magnitude=size(terms) + abs(b), sum=dot((w, y), value - b, "j"),
            terms=terms, after=after,
            note=f"the weights of the last {len(rows)} of {length} tokens",
            follow=((self.op.source, (first + largest(terms).at, i)),),
        )  # fmt: skip
