"""Rules of the normalizations: RMSNorm and LayerNorm of a row, as in the papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from llmcli.graph import ops
from llmcli.graph.evaluation.rule import Numbers, Rule, largest, total
from llmcli.records.explanation import Element, Fact, Sum, Term

OfRows = TypeVar("OfRows", bound=ops.Scale | ops.Normalize)


@dataclass(frozen=True, kw_only=True)
class _Statistics:
    """Mean (LayerNorm only), squares and divisor of a row."""

    mean: float | None
    sum: Sum
    terms: tuple[Term, ...]
    before: tuple[Fact, ...]
    scale: Fact


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

    def statistics(self, x: Sequence[float], row: Sequence[int]) -> _Statistics:
        """The statistics of row `x` with index `row`."""
        size = len(x)
        cell = self.cell(self.op.source, *row, "i")
        mean, before = None, []
        if self.op.norm.kind == "layer":
            mean = math.fsum(x) / size
            formula = f"μ = Σᵢ {cell} / {size} = {{}} / {size}"
            before = [Fact(formula=formula, parts=(math.fsum(x),), value=mean)]
        centred = [number - (mean or 0.0) for number in x]
        parts = [(c,) if mean is None else (a, c) for a, c in zip(x, centred, strict=True)]
        terms = tuple(Term(at=i, parts=part, value=part[-1] ** 2) for i, part in enumerate(parts))
        columns = (cell, f"{cell} − μ") if mean is not None else (cell,)
        squares = f"({cell} − μ)²" if mean is not None else f"{cell}²"
        summed = total(terms)
        scale = Fact(
            formula=f"s = √(Σ / {size} + ε) = √({{}} / {size} + {self.op.norm.eps:g})",
            parts=(summed,),
            value=math.sqrt(summed / size + self.op.norm.eps),
        )
        sum_ = Sum(formula=squares, over="i", columns=(*columns, squares), value=summed)
        return _Statistics(mean=mean, sum=sum_, terms=terms, before=tuple(before), scale=scale)


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
        return Element(
            value=found.scale.value,
            before=found.before,
            sum=found.sum,
            terms=found.terms,
            after=(found.scale,),
            follow=((self.op.source, (*row, largest(found.terms).at)),),
        )


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
        """|x| and the terms of the mean, scaled, plus |bias|."""
        x = self._rows(values)
        spread = x.abs() + x.abs().mean(-1, keepdim=True) * self._mean_is_rounded(values, x)
        out = spread / self.scales(x) * self._factors(values).abs()
        out = out if self.op.bias is None else out + values.vector(self.op.bias).abs()
        return self._split(out, values)

    def _mean_is_rounded(self, values: Numbers, x: Tensor) -> Tensor:
        """Whether the kernel subtracts a mean, with a rounding error of Σ|x|, per row: `[T, 1]`.

        True for a LayerNorm, and for an RMSNorm of a single row, which `ops.norm.rms_norm` computes
        as the LayerNorm of (x, -x), whose mean is 0 up to rounding.
        """
        one_head = x.ndim == 2 or len(x) == 1
        taken = [self.op.norm.kind == "layer" or (one_head and alone) for alone in values.alone]
        return torch.tensor(taken)[:, None]

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The row's statistics, then the normalized number."""
        *row, i = index
        rows = self._rows(values)
        note = ""
        if self.op.joined:
            (head, token), wide = row, values[self.op.source].shape[-1]
            note = f"{self.letter_of(self.op.source)} with its heads side by side: "
            note += f"{head * wide + i} = {head} · {wide} + {i}"
            row, i = [token], head * wide + i
        own = i  # index in the whole row
        if self.op.groups > 1:
            size = rows.shape[-1]
            rows, i = rows[own // size], own % size
            note = f"{note}; " * bool(note)
            note += f"its group are the numbers {own - i} to {own - i + size - 1} of the row"
        x = rows[tuple(row)].tolist()
        found = self.statistics(x, row)
        w = 1.0 if self.op.weight is None else float(values.weight(self.op.weight)[own])
        b = None if self.op.bias is None else float(values.weight(self.op.bias)[own])
        scale = found.scale.value
        offset = self.op.norm.offset if self.op.weight is not None else 0.0
        value = (x[i] - (found.mean or 0.0)) / scale * (offset + w) + (b or 0.0)
        cell = self.cell(self.op.source, *row, own)
        words = cell if found.mean is None else f"({cell} − μ)"
        numbers = "{}" if found.mean is None else "({} − {})"
        factor = (f"w[{own}]", "{}")
        if offset:
            factor = (f"({offset:g} + w[{own}])", f"({offset:g} + {{}})")
        words, numbers = f"{words} / s", f"{numbers} / {{}}"
        parts = [x[i], *([] if found.mean is None else [found.mean]), scale]
        if self.op.weight is not None:
            words, numbers = f"{words} · {factor[0]}", f"{numbers} · {factor[1]}"
            parts.append(w)
        if b is not None:
            words, numbers, parts = f"{words} + b[{own}]", f"{numbers} + {{}}", [*parts, b]
        last = Fact(formula=f"{words} = {numbers}", parts=tuple(parts), value=value)
        return Element(
            value=value,
            note=note,
            before=found.before,
            sum=found.sum,
            terms=found.terms,
            after=(found.scale, last),
            follow=((self.op.source, index),),
        )
