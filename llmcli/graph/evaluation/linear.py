"""Rules of linear ops: table lookups, sums, and products with a matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from llmcli.graph import ops
from llmcli.graph.blocks import RUN
from llmcli.graph.evaluation.rule import (
    Numbers,
    Rule,
    concatenated,
    dot,
    in_bits,
    largest,
    products,
    size,
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
        return _split(found, self.op.heads) if self.op.heads else found

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
        magnitude = 0.0 if self.op.scale == 1 else abs(scale * stored)
        return Element(value=scale * stored, magnitude=magnitude, note=note, after=(fact,))


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
            magnitude=0.0 if self._copies else size(terms) * abs(factor),
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
            value=value, magnitude=abs(x), after=(fact,), follow=((self.op.source, index),)
        )


class Project(Rule[ops.Project]):
    """`Q = T¹ W_q + b_q`: every number is a row times a column, plus a bias."""

    def tensor(self, values: Numbers) -> Tensor:
        """All rows times all columns."""
        out_TN = _product(values, self.op)
        if self.op.bias is not None:
            out_TN = out_TN + values.vector(self.op.bias)
        if self.op.clip is not None:
            out_TN = out_TN.clamp(-self.op.clip, self.op.clip)
        return _split(out_TN, self.op.heads) if self.op.heads else out_TN

    def magnitudes(self, values: Numbers) -> Tensor:
        """|rows| times |columns|."""
        out_TN = _product(values, self.op, absolute=True)
        if self.op.bias is not None:
            out_TN = out_TN + values.vector(self.op.bias).abs()
        return _split(out_TN, self.op.heads) if self.op.heads else out_TN

    def halves(self, values: Numbers, result: Tensor) -> Tensor:
        """Including the rounding of residual stream rows before the product."""
        found = super().halves(values, result)
        return found + self.magnitudes(values) if self.rules[self.op.source].node.wide else found

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
        integer = round(seen / d) if d else 0
        row, run = self.cell(self.op.source, token, "i"), f"i = {first} … {first + RUN - 1}"
        step = Fact(
            formula=f"d = max |{row}| / {by} over {run} = {{}} / {by}",
            parts=(largest_x,),
            value=d,
        )
        read = Fact(
            formula=f"{self.cell(self.op.source, token, at)}{in_bits(values, self.op.weight)}: "
            f"{{}} / d = {{}} is rounded, {{}} · d",
            parts=(x, x / d if d else 0.0, float(integer)),
            value=seen,
        )
        return step, read

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The dot product of the row and the column."""
        token = index[1] if self.op.heads else index[0]
        wide = values.size(self.op.weight)[1] // max(self.op.heads, 1)
        column = index[0] * wide + index[2] if self.op.heads else index[1]
        element = self._dot(values, token, column)
        if not self.op.heads:
            return element
        head, _, i = index
        which = f"({self.op.head} {head}, number {i})"
        note = f"{self.letter_of(self.op.weight)}: column {column} = {head} · {wide} + {i} {which}"
        return replace(element, note=note)

    def _dot(self, values: Numbers, token: int, column: int) -> Element:
        column_K = values.columns(self.op.weight, slice(column, column + 1))[:, 0]
        x_K = values.read(self.op.source, self.op.weight)[token]
        terms = products(x_K.tolist(), column_K.tolist())
        summed = total(terms)
        cell_i = self.cell(self.op.source, token, "i") + in_bits(values, self.op.weight)
        columns = (cell_i, self.cell(self.op.weight, "i", column))
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
        if (clip := self.op.clip) is not None:
            before, value = value, max(-clip, min(value, clip))
            after.append(Fact(formula=f"clip({{}}, ±{clip:g})", parts=(before,), value=value))
        at = largest(terms).at
        cell: tuple[int, ...] = (token, at)
        note, x = "", values[self.op.source]
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
            before=self._rounding(values, token, at),
            sum=dot(columns, summed),
            terms=terms,
            after=tuple(after),
            follow=((self.op.source, cell),),
        )


class HeadShare(Rule[ops.HeadShare]):
    """`C W_o`, head by head: the contribution of one head to the attention output, `[H, T, D]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """Each head times its rows of the matrix."""
        return self._shares(values)

    def magnitudes(self, values: Numbers) -> Tensor:
        """The shares of absolute values."""
        return self._shares(values, absolute=True)

    def _shares(self, values: Numbers, *, absolute: bool = False) -> Tensor:
        z_THe = self._read(values)
        parts = []
        for w_KD in _blocks(values, self.op.weight, absolute):
            w_HeD = w_KD.view(*z_THe.shape[1:], -1)
            z = z_THe.abs() if absolute else z_THe
            parts.append(torch.einsum("the,hed->htd", z, w_HeD))
        return torch.cat(parts, dim=-1)

    def _read(self, values: Numbers) -> Tensor:
        """The heads' results as read by the product, `[T, H, e]`."""
        z_TK = values.read(self.op.source, self.op.weight)
        return z_TK.view(len(z_TK), len(values[self.op.source]), -1)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """A dot product over the numbers of the head."""
        head, token, i = index
        z_e = self._read(values)[token, head]
        first = head * len(z_e)
        column_K = values.columns(self.op.weight, slice(i, i + 1))[:, 0]
        terms = products(z_e.tolist(), column_K[first : first + len(z_e)].tolist())
        row = f"{first}+i" if first else "i"
        cell_i = self.cell(self.op.source, head, token, "i")
        cell_i += in_bits(values, self.op.weight)
        columns = (cell_i, self.cell(self.op.weight, row, i))
        value = total(terms)
        return Element(
            value=value,
            magnitude=size(terms),
            sum=dot(columns, value),
            terms=terms,
            follow=((self.op.source, (head, token, largest(terms).at)),),
        )


def _product(values: Numbers, op: ops.Project, *, absolute: bool = False) -> Tensor:
    """Rows times columns, optionally of absolute values."""
    x_TK = values.read(op.source, op.weight)
    x_TK = x_TK.abs() if absolute else x_TK
    parts = [
        torch.einsum("tk,kn->tn", x_TK, w_KN) for w_KN in _blocks(values, op.weight, absolute)
    ]
    return torch.cat(parts, dim=1)


def _blocks(values: Numbers, name: str, absolute: bool) -> Iterator[Tensor]:
    """Yield columns of a matrix (or absolute values) in blocks: an output head may have 256k."""
    rows, columns = values.size(name)
    step = max(1, _NUMBERS // rows)
    for first in range(0, columns, step):
        w_KN = values.columns(name, slice(first, first + step))
        yield w_KN.abs_() if absolute else w_KN


def _split(x_TN: Tensor, heads: int) -> Tensor:
    """`[T, H·d]` → `[H, T, d]`."""
    return torch.stack(x_TN.chunk(heads, dim=-1))
