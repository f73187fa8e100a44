"""The rule of RoPE (Su et al. 2021): rotation of pairs by an angle per position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmcli.graph import ops
from llmcli.graph.evaluation.frequencies import frequencies
from llmcli.graph.evaluation.rule import Numbers, Rule, largest, total
from llmcli.records.explanation import Element, Fact, Term


class Rotate(Rule[ops.Rotate]):
    """`Q_rot = R(position) Q`: dimension i of a head is paired with i + R/2."""

    def tensor(self, values: Numbers) -> Tensor:
        """Position by position."""
        x = values[self.op.source]
        half = self.op.rope.dims // 2
        out = x.clone()
        angle_TN, factor_T1 = self._turns(values)
        cos_TN, sin_TN = angle_TN.cos() * factor_T1, angle_TN.sin() * factor_T1
        a, b = x[..., :half], x[..., half : 2 * half]
        out[..., :half] = a * cos_TN - b * sin_TN
        out[..., half : 2 * half] = b * cos_TN + a * sin_TN
        return out

    def _turns(self, values: Numbers) -> tuple[Tensor, Tensor]:
        """The angle of every pair at every position, `[T, N]`, and the factors `[T, 1]`."""
        lengths = [values.length(at) for at in values.positions]
        known = {length: frequencies(self.op.rope, length) for length in set(lengths)}
        positions_T1 = torch.tensor(values.positions, dtype=torch.float64)[:, None]
        omegas, factors = zip(*(known[length] for length in lengths), strict=True)
        factor_T1 = torch.tensor(factors, dtype=torch.float64)[:, None]
        return positions_T1 * torch.tensor(omegas, dtype=torch.float64), factor_T1

    def magnitudes(self, values: Numbers) -> Tensor:
        """Both products of a pair with float64 angles; dimensions without RoPE are copies."""
        x = values[self.op.source].abs()
        half = self.op.rope.dims // 2
        out = torch.zeros_like(x)
        angle_TN, factor = self._turns(values)
        a, b = x[..., :half], x[..., half : 2 * half]
        cos, sin, off = angle_TN.cos().abs(), angle_TN.sin().abs(), self._off(angle_TN, values)
        out[..., :half] = (a * cos + b * sin + (a + b) * off) * factor
        out[..., half : 2 * half] = (b * cos + a * sin + (a + b) * off) * factor
        return out

    def _off(self, angle: Tensor, values: Numbers) -> Tensor:
        """The error of cos and sin from the rounded angle, in eps of the kernel."""
        return angle * (torch.finfo(torch.float64).eps / values.eps)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The angle, its cosine and sine, and the two numbers of the pair."""
        *_, position, i = index
        x = values[self.op.source]
        omegas, factor = frequencies(self.op.rope, x.shape[-2])
        half = len(omegas)
        own = self.cell(self.op.source, *index)
        if i >= 2 * half:
            value = float(x[index])
            note = f"only the first {2 * half} numbers of a head are rotated, this is number {i}"
            fact = Fact(formula=own, parts=(), value=value)
            return Element(
                value=value, note=note, after=(fact,),
                follow=((self.op.source, index),),
            )  # fmt: skip
        other = i - half if i >= half else i + half
        x_own, x_other = float(x[index]), float(x[*index[:-1], other])
        omega = omegas[i % half]
        cos, sin = math.cos(position * omega) * factor, math.sin(position * omega) * factor
        sign = 1.0 if i >= half else -1.0
        terms = (
            Term(at=i, parts=(x_own, cos), value=x_own * cos),
            Term(at=other, parts=(x_other, sin), value=sign * x_other * sin),
        )
        partner = self.cell(self.op.source, *index[:-1], other)
        between = "+" if i >= half else "−"
        value = total(terms)
        last = Fact(
            formula=f"{own} · cos φ {between} {partner} · sin φ = "
            f"{{}} · {{}} {between} {{}} · {{}}",
            parts=(x_own, cos, x_other, sin),
            value=value,
        )
        return Element(
            value=value,
            before=self._turn(position, i % half, omega, cos, sin, factor),
            after=(last,),
            follow=((self.op.source, (*index[:-1], largest(terms).at)),),
        )

    def _turn(
        self, position: int, pair: int, omega: float, cos: float, sin: float, factor: float
    ) -> tuple[Fact, ...]:
        kind = type(self.op.rope.scaling).__name__.removesuffix("Scaling")
        plain = f"ω = {self.op.rope.theta:g}^(−2·{pair}/{self.op.rope.dims})"
        stretched = plain if self.op.rope.scaling is None else f"{plain}, stretched ({kind})"
        times = "" if factor == 1.0 else f" · {factor:g}"
        return (
            Fact(formula=stretched, parts=(), value=omega),
            Fact(
                formula=f"φ = position · ω = {position} · {{}}",
                parts=(omega,),
                value=position * omega,
            ),
            Fact(formula=f"cos φ{times}", parts=(), value=cos),
            Fact(formula=f"sin φ{times}", parts=(), value=sin),
        )
