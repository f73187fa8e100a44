"""Rules of the normalizations of rows: RMSNorm and LayerNorm as in the papers, and to length 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from llmcli.config.norm import HeadNorm
from llmcli.evaluate.numbers import Number, clip, leaf, root
from llmcli.evaluate.pointwise import heads_of
from llmcli.evaluate.rule import Axis, Numbers, Reader, Rule, largest
from llmcli.graph import ops, recurrence

OfRows = TypeVar("OfRows", bound=ops.Scale | ops.Normalize)


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

    def _statistics(
        self, read: Reader, x: Sequence[float], row: Sequence[int], first: int = 0
    ) -> tuple[Number | None, Number]:
        """The mean of a LayerNorm, and the divisor, of row `x` with index `row`.

        `first`: the index of the first number of `x`, which may be a part of the row.
        """
        size, mean = len(x), None
        cell = self.cell(self.op.source, *row, Axis(first=first))
        if self.op.norm.kind == "layer":
            mean = leaf(math.fsum(x), f"Σᵢ {cell}") / size
            read.before = mean.line("μ").lines
            mean = leaf(float(mean.x), "μ")
        summed = read.squares(x, cell, None if mean is None else float(mean.x))
        return mean, root(summed / size, self.op.norm.eps).line("s")


class Scale(_Rows[ops.Scale]):
    """`s = √(mean((X − μ)²) + ε)` of every row (RMSNorm: without μ), `[…, 1]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """Row by row."""
        return self.scales(values[self.op.source])

    def magnitudes(self, values: Numbers) -> Tensor:
        """The result plus |μ|."""
        x = values[self.op.source]
        return self.scales(x) + self._means(x).abs()

    def _compute(self, read: Reader) -> Number:
        *row, _ = read.index
        _, s = self._statistics(read, read.values[self.op.source][tuple(row)].tolist(), row)
        read.follow.append((self.op.source, (*row, largest(read.terms).at)))
        return s


class Normalize(_Rows[ops.Normalize]):
    """`T¹ = (X − μ) / s · w + b` (RMSNorm: `X / s · w`), the shape of X."""

    def tensor(self, values: Numbers) -> Tensor:
        """Row by row."""
        x = self._rows(values)
        out = (x - self._means(x)) / self.scales(x) * self._factors(values)
        out = out if self.op.bias is None else out + values.vector(self.op.bias)
        out, limit = self._split(out, values), self.op.clip
        return out if limit is None else out.clamp(-limit, limit)

    def _factors(self, values: Numbers) -> Tensor:
        """The factors on a row, `[d]`, or on the rows of each head, `[H, 1, d]`."""
        if self.op.weight is None:
            return torch.ones(values[self.op.source].shape[-1], dtype=torch.float64)
        factors = values.vector(self.op.weight) + self.op.norm.offset
        if isinstance(self.op.norm, HeadNorm):
            return factors[:, None]
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

    def _compute(self, read: Reader) -> Number:
        op, (*row, i) = self.op, read.index
        rows, notes = self._rows(read.values), []
        read.follow.append((op.source, read.index))
        if op.joined:
            (head, token), wide = row, read.values[op.source].shape[-1]
            row, i = [token], head * wide + i
            heads = f"{self.letter_of(op.source)} with its heads side by side"
            notes.append(f"{heads}: {i} = {head} · {wide} + {i - head * wide}")
        own = i  # index in the whole row
        if op.groups > 1:
            size = rows.shape[-1]
            rows, i = rows[own // size], own % size
            last = own - i + size - 1
            notes.append(f"its group are the numbers {own - i} to {last} of the row")
        read.note = "; ".join(notes)
        x = rows[tuple(row)]
        mean, s = self._statistics(read, x.tolist(), row, own - i)
        y = self.leaf(x[i], op.source, *row, own)
        y = (y if mean is None else y - mean) / s
        if op.weight is not None:
            at = (row[0], own) if isinstance(op.norm, HeadNorm) else (own,)
            w = read.stored(op.weight, *at)
            y = y * (op.norm.offset + w if op.norm.offset else w)
        if op.bias is not None:
            y = y + read.stored(op.bias, own)
        return y if op.clip is None else clip(y.line(), -op.clip, op.clip)


class UnitLength(Rule[recurrence.UnitLength]):
    """`Q = x / √(Σ x² + ε) · s`, head by head."""

    def tensor(self, values: Numbers) -> Tensor:
        """Row by row."""
        x = heads_of(self.op.cut, values)
        return x / ((x * x).sum(-1, keepdim=True) + self.op.eps) ** 0.5 * self.op.scale

    def magnitudes(self, values: Numbers) -> Tensor:
        """The absolute results."""
        return self.tensor(values).abs()

    def _compute(self, read: Reader) -> Number:
        op, cut, (head, token, i) = self.op, self.op.cut, read.index
        x, first = heads_of(cut, read.values)[head, token], cut.first + head * cut.size
        summed = read.squares(x.tolist(), self.cell(cut.source, token, Axis(first=first)))
        read.follow.append((cut.source, (token, first + i)))
        y = self.leaf(x[i], cut.source, token, first + i) / root(summed, op.eps).line("ℓ")
        return y if op.scale == 1 else y * op.scale
