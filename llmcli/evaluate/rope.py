"""The rule of RoPE (Su et al. 2021): rotation of pairs by an angle per position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmcli.config.frequencies import frequencies
from llmcli.evaluate.numbers import Number, fact, leaf
from llmcli.evaluate.rule import Numbers, Reader, Rule
from llmcli.graph import ops
from llmcli.records.explanation import Fact


class Rotate(Rule[ops.Rotate]):
    """`Q_rot = R(position) Q`: dimension i of a head is paired with i + R/2."""

    def tensor(self, values: Numbers) -> Tensor:
        """Position by position; dimensions without RoPE are copies."""
        return torch.cat([part.x for part in self._parts(values)], -1)

    def magnitudes(self, values: Numbers) -> Tensor:
        """Both products of a pair with float64 angles; dimensions without RoPE are copies."""
        parts = self._parts(values, bounds=True)
        return torch.cat([part.off for part in parts if part.off is not None], -1)

    def _parts(self, values: Numbers, *, bounds: bool = False) -> tuple[Number, ...]:
        """The first numbers of pairs, the second ones, the rest; `bounds`: with their errors."""
        x, dims = values[self.op.source], self.op.rope.dims
        a, b = (Number(x=half) for half in x[..., :dims].chunk(2, -1))
        rest = Number(x=x[..., dims:], off=torch.zeros_like(x[..., dims:]))
        lengths = [values.length(at) for at in values.positions]
        known = {length: frequencies(self.op.rope, length) for length in set(lengths)}
        positions_T1 = torch.tensor(values.positions, dtype=torch.float64)[:, None]
        omegas, factors = zip(*(known[length] for length in lengths), strict=True)
        factor_T1 = torch.tensor(factors, dtype=torch.float64)[:, None]
        angle_TN = positions_T1 * torch.tensor(omegas, dtype=torch.float64)
        off_TN = None
        if bounds:  # cos and sin are those of the rounded angle
            off_TN = angle_TN * (torch.finfo(torch.float64).eps / values.eps) * factor_T1
        cos = Number(x=angle_TN.cos() * factor_T1, off=off_TN)
        sin = Number(x=angle_TN.sin() * factor_T1, off=off_TN)
        return a * cos - b * sin, b * cos + a * sin, rest

    def _compute(self, read: Reader) -> Number:
        source, (*row, i) = self.op.source, read.index
        omegas, factor = frequencies(self.op.rope, read.values.length(row[-1]))
        own, half = read.at(source, *row, i), len(omegas)
        if i >= 2 * half:
            read.note = (
                f"only the first {2 * half} numbers of a head are rotated, this is number {i}"
            )
            return own
        at = i - half if i >= half else i + half
        other = read.at(source, *row, at)
        read.before = self._turn(row[-1], i % half, omegas[i % half], factor)
        kept = own * leaf(read.before[2].value, "cos φ")
        taken = other * leaf(read.before[3].value, "sin φ")
        del read.follow[0 if abs(taken.x) > abs(kept.x) else 1]
        return kept + taken if i >= half else kept - taken

    def _turn(self, position: int, pair: int, omega: float, factor: float) -> tuple[Fact, ...]:
        """The frequency, the angle, its cosine and sine."""
        words = f"ω = {self.op.rope.theta:g}^(−2·{pair}/{self.op.rope.dims})"
        if (scaling := self.op.rope.scaling) is not None:
            words += f", stretched ({type(scaling).__name__.removesuffix('Scaling')})"
        angle, times = position * omega, "" if factor == 1.0 else f" · {factor:g}"
        return (
            fact(words, omega),
            fact(f"φ = position · ω = {position} · {{}}", angle, omega),
            fact(f"cos φ{times}", math.cos(angle) * factor),
            fact(f"sin φ{times}", math.sin(angle) * factor),
        )
