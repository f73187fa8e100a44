"""Rules of linear ops: table lookups, sums, and products with a matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmcli.graph import ops
from llmcli.graph.evaluation.rule import (
    Numbers,
    Rule,
    largest,
    symbol,
    total,
)
from llmcli.records.explanation import Element, Fact, Term

_NUMBERS = 1 << 22  # of a matrix, copied to float64 at a time: 32 MiB


class LookUp(Rule[ops.LookUp]):
    """`E = W_E[id]` or `P = W_P[position]`: a row of a table for every token, `[T, D]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """The rows, one after the other."""
        rows = [at if self.op.by_position else values.ids[at] for at in values.positions]
        found = values.table_rows(self.op.table, rows) * self._scale(values)
        return torch.stack(found.chunk(self.op.heads, -1)) if self.op.heads else found

    def magnitudes(self, values: Numbers) -> Tensor:
        """Zero for a copy."""
        if self.op.scale == 1:
            return torch.zeros(1, dtype=torch.float64)
        return self.tensor(values).abs()

    def magnitude(self, values: Numbers, name: str, index: tuple[int, ...]) -> float:
        """Zero for a copy."""
        return 0.0 if self.op.scale == 1 else super().magnitude(values, name, index)

    def _scale(self, values: Numbers) -> float:
        if not self.op.rounded:
            return self.op.scale
        return float(torch.tensor(self.op.scale, dtype=values.weight(self.op.table).dtype))

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """One number of the table."""
        *head, token, i = index
        if self.op.heads:
            i += head[0] * values.kernel(self.node.name).shape[-1]
        row = token if self.op.by_position else values.ids[token]
        stored = float(values.table_rows(self.op.table, [row])[0, i])
        scale = self._scale(values)
        table = self.letter_of(self.op.table)
        which = (
            f"token {token} stands at position {row}"
            if self.op.by_position
            else f"token {token} has the id {row}"
        )
        note = f"{which}: row {row} of {table}, {values.origin(self.op.table)}"
        cell = symbol(table, row, i)
        fact = Fact(formula=cell, parts=(), value=stored)
        if self.op.scale != 1:
            fact = Fact(
                formula=f"scale · {cell} = {{}} · {{}}", parts=(scale, stored), value=scale * stored
            )
        return Element(value=scale * stored, note=note, after=(fact,))


class Add(Rule[ops.Add]):
    """`T³ = T² + X`: the sum of parts of the residual stream, `[T, D]` each, times a factor."""

    def tensor(self, values: Numbers) -> Tensor:
        """Number by number."""
        parts = torch.stack([values[name] for name in self.op.parts])
        return parts.sum(0) * self._factor(values)

    def _factor(self, values: Numbers) -> float:
        weight = 1.0 if self.op.weight is None else float(values.vector(self.op.weight))
        return self.op.scale * weight

    def magnitudes(self, values: Numbers) -> Tensor:
        """Σ|parts|; zero for a single part, which is a copy."""
        if self._copies:
            return torch.zeros(1, dtype=torch.float64)
        parts = torch.stack([values[name].abs() for name in self.op.parts])
        return parts.sum(0) * abs(self._factor(values))

    @property
    def _copies(self) -> bool:
        return len(self.op.parts) == 1 and self.op.plain

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The parts' numbers, and all earlier parts of the stream."""
        terms = tuple(
            Term(
                at=i,
                parts=(),
                value=float(values[name][index]),
                label=self.cell(name, *index),
            )
            for i, name in enumerate(self.op.parts)
        )
        formula = " + ".join(f"{term.label}" for term in terms)
        parts = " + ".join("{}" for _ in terms)
        factor = self._factor(values)
        if not self.op.plain:
            formula, parts = (f"{factor:g} · ({words})" for words in (formula, parts))
        value = total(terms) * factor
        added = Fact(
            formula=formula if self._copies else f"{formula} = {parts}",
            parts=() if self._copies else tuple(term.value for term in terms),
            value=value,
        )
        origins = tuple(
            Term(at=i, parts=(), value=float(values.kernel_row(name, index)[index[-1]]), label=name)
            for i, name in enumerate(self.op.before)
        )
        return Element(
            value=value,
            after=(added,),
            origins=origins if len(origins) > 2 and self.op.plain else (),
            follow=((self.op.parts[largest(terms).at], index),),
        )


class SoftCap(Rule[ops.SoftCap]):
    """`logits = c · tanh(X / c)`, number by number."""

    def tensor(self, values: Numbers) -> Tensor:
        """Number by number."""
        return (values[self.op.source] / self.op.cap).tanh() * self.op.cap

    def magnitudes(self, values: Numbers) -> Tensor:
        """The input: a cap does not amplify rounding errors."""
        return values[self.op.source].abs()

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """One number."""
        x, cap = float(values[self.op.source][index]), self.op.cap
        value = cap * math.tanh(x / cap)
        fact = Fact(
            formula=f"{cap:g} · tanh({self.cell(self.op.source, *index)} / {cap:g})"
            f" = {cap:g} · tanh({{}} / {cap:g})",
            parts=(x,),
            value=value,
        )
        return Element(
            value=value, after=(fact,), follow=((self.op.source, index),)
        )
