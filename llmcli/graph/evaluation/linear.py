"""Rules of what is linear: rows that are looked up, sums, and products with a matrix."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from llmcli.graph import ops
from llmcli.graph.evaluation.rule import (
    Element,
    Numbers,
    Rule,
    dot,
    exact,
    largest,
    products,
    size,
    symbol,
    total,
)
from llmcli.reports.explanation import Fact, Term

_COLUMNS = 8192  # of a head with 128k columns a copy in float64 would be gigabytes


class LookUp(Rule[ops.LookUp]):
    """`E = W_E[id]` or `P = W_P[position]`: a row of a table for every token, `[T, D]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """The rows, one after the other."""
        rows = [at if self.op.by_position else values.ids[at] for at in values.positions]
        weight_VD = values.weight(self.op.table)
        return exact(weight_VD[torch.tensor(rows, device=weight_VD.device)])

    def magnitudes(self, values: Numbers) -> Tensor:
        """None: a copy."""
        return torch.zeros(1, dtype=torch.float64)

    def magnitude(self, values: Numbers, name: str, index: tuple[int, ...]) -> float:
        """None: a copy."""
        return 0.0

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """One number of the table."""
        token, i = index
        row = token if self.op.by_position else values.ids[token]
        value = float(values.weight(self.op.table)[row, i])
        table = self.letter_of(self.op.table)
        which = (
            f"token {token} stands at position {row}"
            if self.op.by_position
            else f"token {token} has the id {row}"
        )
        note = f"{which}: row {row} of {table}, {values.origin(self.op.table)}"
        fact = Fact(formula=symbol(table, row, i), parts=(), value=value)
        return Element(value=value, magnitude=0.0, note=note, after=(fact,))


class Add(Rule[ops.Add]):
    """`T³ = T² + X`: parts of the residual stream, `[T, D]` each, times a factor."""

    def tensor(self, values: Numbers) -> Tensor:
        """Number by number."""
        return torch.stack([values[name] for name in self.op.parts]).sum(0) * self.op.scale

    def magnitudes(self, values: Numbers) -> Tensor:
        """Of the parts; a single one is a copy."""
        if self._copies:
            return torch.zeros(1, dtype=torch.float64)
        parts = torch.stack([values[name].abs() for name in self.op.parts])
        return parts.sum(0) * abs(self.op.scale)

    @property
    def _copies(self) -> bool:
        return len(self.op.parts) == 1 and self.op.scale == 1

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The parts' numbers, and everything that the stream was made of up to here."""
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
        if self.op.scale != 1:
            formula, parts = (f"{self.op.scale:g} · ({words})" for words in (formula, parts))
        value = total(terms) * self.op.scale
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
            magnitude=0.0 if self._copies else size(terms) * abs(self.op.scale),
            after=(added,),
            origins=origins if len(origins) > 2 and self.op.scale == 1 else (),
            follow=((self.op.parts[largest(terms).at], index),),
        )


class Project(Rule[ops.Project]):
    """`Q = T¹ W_q + b_q`: every number is a row times a column, plus a bias."""

    def tensor(self, values: Numbers) -> Tensor:
        """All rows times all columns."""
        out_TN = _product(_concatenated(values[self.op.source]), values.weight(self.op.weight))
        if self.op.bias is not None:
            out_TN = out_TN + values.vector(self.op.bias)
        return _split(out_TN, self.op.heads) if self.op.heads else out_TN

    def magnitudes(self, values: Numbers) -> Tensor:
        """Absolute values of all rows times those of all columns."""
        x_TK = _concatenated(values[self.op.source]).abs()
        out_TN = _product(x_TK, values.weight(self.op.weight), absolute=True)
        if self.op.bias is not None:
            out_TN = out_TN + values.vector(self.op.bias).abs()
        return _split(out_TN, self.op.heads) if self.op.heads else out_TN

    def halves(self, values: Numbers, result: Tensor) -> Tensor:
        """Rows of the residual stream itself are rounded before they are multiplied."""
        found = super().halves(values, result)
        return found + self.magnitudes(values) if self.rules[self.op.source].node.wide else found

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """A dot product, its terms those of the row and the column."""
        x = values[self.op.source]
        weight_KN = values.weight(self.op.weight)
        token = index[1] if self.op.heads else index[0]
        wide = weight_KN.shape[1] // max(self.op.heads, 1)
        column = index[0] * wide + index[2] if self.op.heads else index[1]
        element = self._dot(values, x, weight_KN[:, column], token, column)
        if not self.op.heads:
            return element
        head, _, i = index
        which = f"({self.op.head} {head}, number {i})"
        note = f"{self.letter_of(self.op.weight)}: column {column} = {head} · {wide} + {i} {which}"
        return replace(element, note=note)

    def _dot(
        self, values: Numbers, x: Tensor, column_K: Tensor, token: int, column: int
    ) -> Element:
        terms = products(_concatenated(x)[token].tolist(), exact(column_K).tolist())
        summed = total(terms)
        columns = (self.cell(self.op.source, token, "i"), self.cell(self.op.weight, "i", column))
        value, b, after = summed, 0.0, []
        if self.op.bias is not None:
            b = float(values.weight(self.op.bias)[column])
            value = summed + b
            after = [
                Fact(
                    formula=f"Σ + {self.cell(self.op.bias, column)} = {{}} + {{}}",
                    parts=(summed, b),
                    value=value,
                )
            ]
        at = largest(terms).at
        cell: tuple[int, ...] = (token, at)
        note = ""
        if x.ndim == 3:
            wide = x.shape[2]
            head, i = divmod(at, wide)
            cell = (head, token, i)
            note = (
                f"{self.letter_of(self.op.source)} with its heads side by side: "
                f"i = head · {wide} + number, "
                f"as {at} = {head} · {wide} + {i}"
            )
        return Element(
            value=value,
            magnitude=size(terms) + abs(b),
            note=note,
            sum=dot(columns, summed),
            terms=terms,
            after=tuple(after),
            follow=((self.op.source, cell),),
        )


class HeadShare(Rule[ops.HeadShare]):
    """`C W_o`, head by head: what one head adds to the attention's output, `[H, T, D]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """Every head times its own rows of the matrix."""
        z_HTe = values[self.op.source]
        w_HeD = exact(values.weight(self.op.weight)).reshape(len(z_HTe), z_HTe.shape[2], -1)
        return torch.einsum("hte,hed->htd", z_HTe, w_HeD)

    def magnitudes(self, values: Numbers) -> Tensor:
        """The same of the absolute values."""
        z_HTe = values[self.op.source].abs()
        w_HeD = exact(values.weight(self.op.weight)).abs_().reshape(len(z_HTe), z_HTe.shape[2], -1)
        return torch.einsum("hte,hed->htd", z_HTe, w_HeD)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """A dot product over the numbers of the head."""
        head, token, i = index
        z_Te = values[self.op.source][head]
        first = head * z_Te.shape[1]
        column_e = values.weight(self.op.weight)[first : first + z_Te.shape[1], i]
        terms = products(z_Te[token].tolist(), exact(column_e).tolist())
        row = f"{first}+i" if first else "i"
        columns = (self.cell(self.op.source, head, token, "i"), self.cell(self.op.weight, row, i))
        value = total(terms)
        return Element(
            value=value,
            magnitude=size(terms),
            sum=dot(columns, value),
            terms=terms,
            follow=((self.op.source, (head, token, largest(terms).at)),),
        )


def _product(x_TK: Tensor, weight_KN: Tensor, *, absolute: bool = False) -> Tensor:
    """Rows times columns, or times their absolute values; so many columns in float64 at a time."""
    parts = []
    for first in range(0, weight_KN.shape[1], _COLUMNS):
        wide_KN = exact(weight_KN[:, first : first + _COLUMNS])
        parts.append(torch.einsum("tk,kn->tn", x_TK, wide_KN.abs_() if absolute else wide_KN))
    return torch.cat(parts, dim=1)


def _concatenated(x: Tensor) -> Tensor:
    """`[H, T, e]` → `[T, H·e]`; a matrix stays as it is."""
    return x if x.ndim == 2 else torch.cat(list(x), dim=-1)


def _split(x_TN: Tensor, heads: int) -> Tensor:
    """`[T, H·d]` → `[H, T, d]`."""
    return torch.stack(x_TN.chunk(heads, dim=-1))
