"""Rules of the normalizations of rows: RMSNorm and LayerNorm as in the papers, and to length 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from llmcli.evaluate.numbers import fact, leaf
from llmcli.evaluate.pointwise import heads_of
from llmcli.evaluate.rule import Numbers, Rule, largest, total
from llmcli.graph import ops, recurrence
from llmcli.records.explanation import Element, Fact, Sum, Term

OfRows = TypeVar("OfRows", bound=ops.Scale | ops.Normalize)


def squares(x: Sequence[float], cell: str, mean: float | None = None) -> Element:
    """The sum of squares of a row, whose numbers have the symbol `cell`; less the mean if given."""
    centred = x if mean is None else [number - mean for number in x]
    parts = [(c,) if mean is None else (a, c) for a, c in zip(x, centred, strict=True)]
    terms = tuple(Term(at=i, parts=part, value=part[-1] ** 2) for i, part in enumerate(parts))
    columns = (cell,) if mean is None else (cell, f"{cell} − μ")
    squared = f"{cell}²" if mean is None else f"({cell} − μ)²"
    summed = total(terms)
    found = Sum(formula=squared, over="i", columns=(*columns, squared), value=summed)
    return Element(value=summed, sum=found, terms=terms)


class _Rows(Rule[OfRows]):
    """Common base: the statistics of rows."""

    def scales(self, x: Tensor) -> Tensor:
        """The divisors `[…, 1]` of rows `[…, d]`."""
        size = x.shape[-1]
        centred = x - self._means(x)
        return ((centred * centred).sum(-1, keepdim=True) / size + self.op.norm.eps) ** 0.5

    def _means(self, x: Tensor) -> Tensor:
        if self.op.norm.kind == "rms":
            return torch.zeros_like(x[..., :1])
        return x.sum(-1, keepdim=True) / x.shape[-1]

    def statistics(self, x: Sequence[float], row: Sequence[int], first: int = 0) -> Element:
        """The divisor of row `x` with index `row`; `before` has the mean of a LayerNorm.

        `first`: the index of the first number of `x`, which may be a part of the row.
        """
        size, mean = len(x), None
        cell = self.cell(self.op.source, *row, f"{first}+i" if first else "i")
        before: tuple[Fact, ...] = ()
        if self.op.norm.kind == "layer":
            mean = math.fsum(x) / size
            before = (fact(f"μ = Σᵢ {cell} / {size} = {{}} / {size}", mean, math.fsum(x)),)
        found, eps = squares(x, cell, mean), self.op.norm.eps
        words = f"s = √(Σ / {size} + ε) = √({{}} / {size} + {eps:g})"
        scale = fact(words, math.sqrt(found.value / size + eps), found.value)
        return replace(found, value=scale.value, before=before, after=(scale,))


class Scale(_Rows[ops.Scale]):
    """`s = √(mean((X − μ)²) + ε)` of every row (RMSNorm: without μ), `[…, 1]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """Row by row."""
        return self.scales(values[self.op.source])

    def magnitudes(self, values: Numbers) -> Tensor:
        """The result plus |μ|."""
        x = values[self.op.source]
        return self.scales(x) + self._means(x).abs()

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The mean, the squares, the root."""
        *row, _ = index
        found = self.statistics(values[self.op.source][tuple(row)].tolist(), row)
        return replace(found, follow=((self.op.source, (*row, largest(found.terms).at)),))


class Normalize(_Rows[ops.Normalize]):
    """`T¹ = (X − μ) / s · w + b` (RMSNorm: `X / s · w`), the shape of X."""

    def tensor(self, values: Numbers) -> Tensor:
        """Row by row."""
        x = self._rows(values)
        out = (x - self._means(x)) / self.scales(x) * self._factors(values)
        out = out if self.op.bias is None else out + values.vector(self.op.bias)
        return self._split(out, values)

    def _factors(self, values: Numbers) -> Tensor:
        """The factors on a row, `[d]`."""
        if self.op.weight is None:
            return torch.ones(values[self.op.source].shape[-1], dtype=torch.float64)
        factors = values.vector(self.op.weight) + self.op.norm.offset
        return factors.view(self.op.groups, 1, -1) if self.op.groups > 1 else factors

    def _rows(self, values: Numbers) -> Tensor:
        """The normalized rows `[…, T, d]`; for joined heads `[T, H·d]`, for groups `[G, T, n]`."""
        x = values[self.op.source]
        x = torch.cat(list(x), -1) if self.op.joined else x
        return torch.stack(x.chunk(self.op.groups, -1)) if self.op.groups > 1 else x

    def _split(self, x: Tensor, values: Numbers) -> Tensor:
        x = torch.cat(list(x), -1) if self.op.groups > 1 else x
        heads = len(values[self.op.source])
        return torch.stack(x.chunk(heads, -1)) if self.op.joined else x

    def magnitudes(self, values: Numbers) -> Tensor:
        """|x| and the terms of the mean, scaled, plus |bias|.

        A kernel subtracts a mean, with a rounding error of Σ|x|, in a LayerNorm, and in an RMSNorm
        of a single row, which `ops.norm.rms_norm` computes as the LayerNorm of (x, -x), whose mean
        is 0 up to rounding.
        """
        x = self._rows(values)
        one_head = x.ndim == 2 or len(x) == 1
        taken = [self.op.norm.kind == "layer" or (one_head and alone) for alone in values.alone]
        spread = x.abs() + x.abs().mean(-1, keepdim=True) * torch.tensor(taken)[:, None]
        out = spread / self.scales(x) * self._factors(values).abs()
        out = out if self.op.bias is None else out + values.vector(self.op.bias).abs()
        return self._split(out, values)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The row's statistics, then the normalized number."""
        *row, i = index
        rows, notes = self._rows(values), []
        if self.op.joined:
            (head, token), wide = row, values[self.op.source].shape[-1]
            row, i = [token], head * wide + i
            heads = f"{self.letter_of(self.op.source)} with its heads side by side"
            notes.append(f"{heads}: {i} = {head} · {wide} + {i - head * wide}")
        own = i  # index in the whole row
        if self.op.groups > 1:
            size = rows.shape[-1]
            rows, i = rows[own // size], own % size
            last = own - i + size - 1
            notes.append(f"its group are the numbers {own - i} to {last} of the row")
        x = rows[tuple(row)].tolist()
        found = self.statistics(x, row, own - i)
        y = leaf(x[i], self.cell(self.op.source, *row, own))
        for mean in found.before:
            y = y - leaf(mean.value, "μ")
        y = y / leaf(found.value, "s")
        if self.op.weight is not None:
            w = leaf(float(values.weight(self.op.weight)[own]), f"w[{own}]")
            y = y * (self.op.norm.offset + w if self.op.norm.offset else w)
        if self.op.bias is not None:
            y = y + leaf(float(values.weight(self.op.bias)[own]), f"b[{own}]")
        return replace(
            found, value=float(y.x), note="; ".join(notes), after=(*found.after, *y.facts()),
            follow=((self.op.source, index),),
        )  # fmt: skip


class UnitLength(Rule[recurrence.UnitLength]):
    """`Q = x / √(Σ x² + ε) · s`, head by head."""

    def tensor(self, values: Numbers) -> Tensor:
        """Row by row."""
        x = heads_of(self.op.cut, values)
        return x / ((x * x).sum(-1, keepdim=True) + self.op.eps) ** 0.5 * self.op.scale

    def magnitudes(self, values: Numbers) -> Tensor:
        """The absolute results."""
        return self.tensor(values).abs()

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The squares of the head's numbers, the root, the quotient."""
        op, cut, (head, token, i) = self.op, self.op.cut, index
        row, first = heads_of(cut, values)[head, token].tolist(), cut.first + head * cut.size
        found = squares(row, self.cell(cut.source, token, f"{first}+i" if first else "i"))
        length = math.sqrt(found.value + op.eps)
        root = fact(f"ℓ = √(Σ + ε) = √({{}} + {op.eps:g})", length, found.value)
        y = leaf(row[i], self.cell(cut.source, token, first + i)) / leaf(length, "ℓ")
        y = y if op.scale == 1 else y * op.scale
        return replace(
            found, value=float(y.x), after=(root, *y.facts()),
            follow=((cut.source, (token, first + i)),),
        )  # fmt: skip
