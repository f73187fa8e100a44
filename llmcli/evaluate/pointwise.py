"""Rules of what is computed number by number: each states its formula once, in `Number`s."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from llmcli.evaluate.numbers import (
    ACTIVATIONS,
    EXACT,
    Number,
    clip,
    exp,
    fact,
    leaf,
    softplus,
    tanh,
)
from llmcli.evaluate.rule import AnyOp, Exact, Numbers, Reader, Rule
from llmcli.graph import ops
from llmcli.graph import recurrence as recurrent
from llmcli.records.explanation import Element, Term


class Pointwise(Rule[AnyOp]):
    """Every number follows from one number of each input, by `_compute`."""

    def tensor(self, values: Numbers) -> Tensor:
        """Number by number."""
        return self._compute(Reader(self, values)).x

    def magnitudes(self, values: Numbers) -> Tensor:
        """How far off a kernel may be, in eps, see `Number`."""
        off = self._compute(Reader(self, values, off=EXACT)).off
        assert off is not None
        return off


class Activate(Pointwise[ops.Activate]):
    """`Activation(U)`, or of the gate `Activation(G)`, `[T, F]`."""

    def _compute(self, read: Reader) -> Number:
        x = read(self.op.source)
        if self.op.limit is not None:
            x = clip(x, -math.inf, self.op.limit).line()
        return ACTIVATIONS[self.op.function](x)


class Gate(Pointwise[ops.Gate]):
    """`L = Activation(G) ∘ U`, `[T, F]`; a gate `[T, 1]` applies to its row."""

    def _compute(self, read: Reader) -> Number:
        act, clamp = read(self.op.act), self.op.clamp
        up = read(self.op.up, *(() if self.op.item is None else (self.op.item,)))
        if clamp is not None:
            up = (clip(up, -clamp.limit, clamp.limit) + clamp.offset).line()
        return act * up


class SoftCap(Pointwise[ops.SoftCap]):
    """`logits = c · tanh(X / c)`."""

    def _compute(self, read: Reader) -> Number:
        return self.op.cap * tanh(read(self.op.source) / self.op.cap)


class Add(Pointwise[ops.Add]):
    """`T³ = T² + X`: the sum of parts of the residual stream, `[T, D]` each, times a factor."""

    def _compute(self, read: Reader) -> Number:
        total, *parts = map(read, self.op.parts)
        for part in parts:
            total = total + part
        if self.op.weight is not None:
            total = read.parameter(self.op.weight) * total
        return total if self.op.scale == 1 else self.op.scale * total

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The parts' numbers, and all earlier parts of the stream."""
        shown = self.op.before if self.op.plain and len(self.op.before) > 2 else ()
        origins = tuple(
            Term(at=i, parts=(), value=float(values.kernel(name, *index)), label=name)
            for i, name in enumerate(shown)
        )
        element = super().element(values, index)
        most = max(element.follow, key=lambda cell: abs(float(values[cell[0]][index])))
        return replace(element, origins=origins, follow=(most,))


class StepSize(Pointwise[recurrent.StepSize]):
    """`dt = clip(softplus(X + b), least, most)`, `[T, H]`."""

    def _compute(self, read: Reader) -> Number:
        dt = softplus((read(self.op.source) + read.parameter(self.op.bias)).line("x"))
        return clip(dt, self.op.least, self.op.most) if self.op.bounded else dt


class LogDecay(Pointwise[recurrent.LogDecay]):
    """`g = −e^A · dt`, `[T, H]`."""

    def _compute(self, read: Reader) -> Number:
        return -exp(read.parameter(self.op.rate)).line() * read(self.op.source)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The rate and the step size; the remaining share of the state."""
        element = super().element(values, index)
        left = fact("e^g, what is left of the state", math.exp(element.value))
        return replace(element, after=(*element.after, left))


class Skip(Pointwise[recurrent.Skip]):
    """`Y = C + D X`, `[H, T, d]`."""

    def _compute(self, read: Reader) -> Number:
        c, x = read(self.op.source), read(self.op.value)
        return c + read.parameter(self.op.weight, by_head=True) * x


class Join(Exact[ops.Join]):
    """`Q_rot = [Q | Q_pe_rot]`: concatenation within a head, `[H, T, d]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """Copies; an end shared by all heads is repeated."""
        start_HTd, end = values[self.op.start], values[self.op.end]
        return torch.cat((start_HTd, end.expand(len(start_HTd), -1, -1)), -1)

    def _compute(self, read: Reader) -> Number:
        op, (*row, i), size = self.op, read.index, read.values[self.op.start].shape[-1]
        read.note = f"the first {size} numbers are those of {self.letter_of(op.start)}"
        if i < size:
            return read.at(op.start, *row, i)
        return read.at(op.end, *(*row, i - size)[-read.values[op.end].ndim :])


class Cut(Exact[recurrent.Cut]):
    """`V = Z[…]`, cut into heads."""

    def tensor(self, values: Numbers) -> Tensor:
        """The selected numbers."""
        return heads_of(self.op, values)

    def _compute(self, read: Reader) -> Number:
        head, token, i = read.index
        return read.at(self.op.source, token, self.op.first + head * self.op.size + i)


class LookUp(Rule[ops.LookUp]):
    """`E = W_E[id]` or `P = W_P[position]`: a row of a table for every token, `[T, D]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """The rows, one after the other."""
        rows = [at if self.op.by_position else values.ids[at] for at in values.positions]
        found = values.table_rows(self.op.table, rows) * self._scale(values)
        return torch.stack(found.chunk(self.op.heads, -1)) if self.op.heads else found

    def magnitudes(self, values: Numbers) -> Tensor:
        """Zero for a copy."""
        return self.tensor(values).abs() * (self.op.scale != 1)

    def magnitude(self, values: Numbers, index: tuple[int, ...]) -> float:
        """Zero for a copy."""
        return 0.0 if self.op.scale == 1 else super().magnitude(values, index)

    def _scale(self, values: Numbers) -> float:
        if not self.op.rounded:
            return self.op.scale
        return float(torch.tensor(self.op.scale, dtype=values.weight(self.op.table).dtype))

    def _compute(self, read: Reader) -> Number:
        op, values, (*head, token, i) = self.op, read.values, read.index
        if op.heads:
            i += head[0] * values.kernel(self.node.name).shape[-1]
        row, stands = values.ids[token], "has the id"
        if op.by_position:
            row, stands = token, "stands at position"
        origin = f"row {row} of {self.letter_of(op.table)}, {values.origin(op.table)}"
        read.note = f"token {token} {stands} {row}: {origin}"
        made = self.leaf(values.table_rows(op.table, [row])[0, i], op.table, row, i)
        return made if op.scale == 1 else leaf(self._scale(values), "scale") * made


def heads_of(op: recurrent.Cut, values: Numbers) -> Tensor:
    """The numbers that a cut selects, as heads `[H, T, d]`."""
    rows_TC = values[op.source][:, op.first : op.first + op.heads * op.size]
    return torch.stack(rows_TC.chunk(op.heads, -1))
