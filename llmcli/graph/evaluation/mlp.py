"""Rules of the feed-forward: the activation function and the gate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmcli.graph import ops
from llmcli.graph.evaluation.rule import Numbers, Rule
from llmcli.parts.mlp.config import Activation
from llmcli.records.explanation import Element, Fact


class Activate(Rule[ops.Activate]):
    """`Activation(U)`, or of the gate `Activation(G)`, number by number, `[T, F]`."""

    def tensor(self, values: Numbers) -> Tensor:
        """The function's own formula."""
        return _activated(self._bounded(values[self.op.source]), self.op.function)

    def _bounded(self, x: Tensor) -> Tensor:
        limit = self.op.limit
        return x if limit is None else torch.where(x > limit, limit, x)

    def magnitudes(self, values: Numbers) -> Tensor:
        """The magnitude that the function rounds, see `_rounded`."""
        return _rounded(self._bounded(values[self.op.source]), self.op.function)

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The formula with the input number."""
        x, cell = float(values[self.op.source][index]), self.cell(self.op.source, *index)
        before: tuple[Fact, ...] = ()
        if (limit := self.op.limit) is not None:
            cell, bounded = f"min({cell}, {limit:g})", min(x, limit)
            fact = Fact(formula=f"{cell} = min({{}}, {limit:g})", parts=(x,), value=bounded)
            x, before = bounded, (fact,)
        value = float(_activated(torch.tensor(x, dtype=torch.float64), self.op.function))
        return Element(
            value=value,
            after=(*before, *_facts(cell, x, value, self.op.function)),
            follow=((self.op.source, index),),
        )


class Gate(Rule[ops.Gate]):
    """`L = Activation(G) ∘ U`, number by number, `[T, F]`; a gate `[T, 1]` applies to its row."""

    def tensor(self, values: Numbers) -> Tensor:
        """The element-wise product."""
        up = values[self.op.up]
        return values[self.op.act] * self._bounded(up if self.op.item is None else up[self.op.item])

    def _bounded(self, u: Tensor) -> Tensor:
        clamp = self.op.clamp
        if clamp is None:
            return u
        low = torch.where(u < -clamp.limit, -clamp.limit, u)
        return torch.where(low > clamp.limit, clamp.limit, low) + clamp.offset

    def magnitudes(self, values: Numbers) -> Tensor:
        """The absolute products."""
        return self.tensor(values).abs()

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The two factors."""
        gates = values[self.op.act]
        at = (*index[:-1], min(index[-1], gates.shape[-1] - 1))
        inside = index if self.op.item is None else (self.op.item, *index)
        a, u = float(gates[at]), float(values[self.op.up][inside])
        act, up = self.cell(self.op.act, *at), self.cell(self.op.up, *inside)
        before: tuple[Fact, ...] = ()
        if (clamp := self.op.clamp) is not None:
            words = f"{{}}, ±{clamp.limit:g}) + {clamp.offset:g}"
            up, given = f"clip({words.format(up)}", u
            u = min(max(u, -clamp.limit), clamp.limit) + clamp.offset
            before = (Fact(formula=f"{up} = clip({words}", parts=(given,), value=u),)
            up = f"({up})"
        fact = Fact(formula=f"{act} · {up} = {{}} · {{}}", parts=(a, u), value=a * u)
        return Element(
            value=a * u,
            after=(*before, fact),
            follow=((self.op.act, at), (self.op.up, inside)),
        )


def _activated(x: Tensor, function: Activation) -> Tensor:
    if function == "sigmoid":
        return 1 / (1 + torch.exp(-x))
    if function == "silu":
        return x / (1 + torch.exp(-x))
    if function == "quick_gelu":
        return x / (1 + torch.exp(-1.702 * x))
    if function == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    if function == "gelu_tanh":
        return x * (1 + torch.tanh(_inside(x))) / 2
    positive = torch.where(x > 0, x, torch.zeros_like(x))
    return positive * positive if function == "relu2" else positive


def _rounded(x: Tensor, function: Activation) -> Tensor:
    """The magnitude that the function rounds: zero, its square, or its input."""
    if function == "relu":
        return torch.zeros_like(x)
    if function == "sigmoid":  # 1 / (1 + e^−x): relative error of |x|
        return 1 + x.abs()
    return _activated(x, function) if function == "relu2" else x.abs()


def _inside(x: Tensor) -> Tensor:
    """The argument of tanh in GELU's tanh form."""
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)


def _facts(cell: str, x: float, value: float, function: Activation) -> tuple[Fact, ...]:
    number = torch.tensor(x, dtype=torch.float64)
    if function == "sigmoid":
        return (Fact(formula=f"σ({cell}) = 1 / (1 + e^−{cell})", parts=(), value=value),)
    if function == "relu":
        return (Fact(formula=f"max({cell}, 0) = max({{}}, 0)", parts=(x,), value=value),)
    if function == "relu2":
        return (Fact(formula=f"max({cell}, 0)² = max({{}}, 0)²", parts=(x,), value=value),)
    if function in ("silu", "quick_gelu"):
        steep, shown = (1.0, cell) if function == "silu" else (1.702, f"(1.702 · {cell})")
        sigma = float(1 / (1 + torch.exp(-steep * number)))
        inner = shown.removeprefix("(").removesuffix(")") if steep != 1 else shown
        formula, factors = f"σ({inner}) = 1 / (1 + e^−{shown})", (x, sigma)
        last = f"{cell} · σ({inner}) = {{}} · {{}}"
        return (
            Fact(formula=formula, parts=(), value=sigma),
            Fact(formula=last, parts=factors, value=value),
        )
    if function == "gelu":
        phi = float((1 + torch.erf(number / math.sqrt(2))) / 2)
        return (
            Fact(formula=f"Φ({cell}) = (1 + erf({cell} / √2)) / 2", parts=(), value=phi),
            Fact(formula=f"{cell} · Φ({cell}) = {{}} · {{}}", parts=(x, phi), value=value),
        )
    inside = float(_inside(number))
    return (
        Fact(
            formula=f"u = √(2/π) · ({cell} + 0.044715 · {cell}³)",
            parts=(),
            value=inside,
        ),
        Fact(
            formula=f"{cell} · (1 + tanh u) / 2 = {{}} · (1 + {{}}) / 2",
            parts=(x, math.tanh(inside)),
            value=value,
        ),
    )
