"""The rule of concatenation."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.graph import ops
from llmcli.graph.evaluation.rule import Numbers, Rule
from llmcli.records.explanation import Element, Fact


class Join(Rule[ops.Join]):
    """`Q_rot = [Q | Q_pe_rot]`: concatenation within a head, `[H, T, d]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """Copies; an end shared by all heads is repeated."""
        start_HTd, end = values[self.op.start], values[self.op.end]
        return torch.cat((start_HTd, end.expand(len(start_HTd), -1, -1)), -1)

    def magnitudes(self, values: Numbers) -> Tensor:
        """Zero for a copy."""
        return torch.zeros(1, dtype=torch.float64)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The copied number."""
        head, token, i = index
        size = values[self.op.start].shape[-1]
        source, at = (self.op.start, index) if i < size else (self.op.end, (head, token, i - size))
        at = at if values[source].ndim == len(at) else at[1:]
        value = float(values[source][at])
        fact = Fact(formula=self.cell(source, *at), parts=(), value=value)
        note = f"the first {size} numbers are those of {self.letter_of(self.op.start)}"
        return Element(value=value, note=note, after=(fact,), follow=((source, at),))
