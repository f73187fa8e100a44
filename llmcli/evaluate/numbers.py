"""Numbers that carry their arithmetic: a formula written once has a value, a bound, and words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmcli.config.mlp import Activation
from llmcli.records.explanation import Fact

_SUM, _PRODUCT, _ATOM = range(3)  # how tightly the last operation of a formula binds
EXACT = torch.zeros((), dtype=torch.float64)  # an error, or a number, of 0
_FLUSHED = 2.0**-103  # the smallest normal float32 in its eps: a kernel may take less for 0
_LARGEST = torch.finfo(torch.float64).max

Of = Callable[[Tensor], Tensor]  # a function of every number
Errors = Callable[[Tensor, Tensor], Tensor]  # the error of a result from those of its operands


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number, or a tensor of them, with its formula.

    `off`: how far off a kernel may be, in eps (None: not computed), by running error analysis
    (Higham 2002, section 3.3): an operation by half an eps of its result, a sum by half an eps of
    its terms, whether they cancel or not, a function by one eps; where a result may be flushed to
    0, by the smallest normal number besides.
    `words`: the formula; `digits`: the same with a `{}` for each of `parts`; `binds`: its last
    operation; `lines`: parts of it on lines of their own.
    """

    x: Tensor
    off: Tensor | None = None
    words: str = ""
    digits: str = "{}"
    parts: tuple[float, ...] = ()
    binds: int = _ATOM
    lines: tuple[Fact, ...] = ()

    def _with(self, other: Number, sign: str, x: Tensor, errors: Errors) -> Number:
        own, off = (EXACT if one.off is None else one.off for one in (self, other))
        unknown = self.off is None and other.off is None
        binds = _SUM if sign in "+−" else _PRODUCT
        (words, digits), right = self._inside(binds), other._inside(binds + (sign in "/−"))
        return Number(
            x=x,
            off=None if unknown else errors(own, off),
            words=f"{words} {sign} {right[0]}",
            digits=f"{digits} {sign} {right[1]}",
            parts=(*self.parts, *other.parts),
            binds=binds,
            lines=tuple(dict.fromkeys((*self.lines, *other.lines))),
        )

    def _inside(self, binds: int) -> tuple[str, str]:
        """Words and digits, in parentheses if an operation around them binds more tightly."""
        if self.binds >= binds:
            return self.words, self.digits
        return f"({self.words})", self.digits if self.digits == "{}" else f"({self.digits})"

    def __add__(self, other: Number | float) -> Number:
        b = number(other)
        return self._with(b, "+", self.x + b.x, self._of_sum(b))

    def __sub__(self, b: Number) -> Number:
        return self._with(b, "−", self.x - b.x, self._of_sum(b))

    def _of_sum(self, b: Number) -> Errors:
        return lambda own, off: own + off + (self.x.abs() + b.x.abs()) / 2

    def __mul__(self, other: Number | float) -> Number:
        def errors(own: Tensor, off: Tensor) -> Tensor:
            return own * b.x.abs() + off * self.x.abs() + x.abs() / 2

        b = number(other)
        x = self.x * b.x
        return self._with(b, "·", x, errors)

    def __truediv__(self, other: Number | float) -> Number:
        def errors(own: Tensor, off: Tensor) -> Tensor:
            off = torch.nan_to_num(off, nan=_LARGEST, posinf=_LARGEST)  # where `b` overflows
            return (own + off * x.abs()) / b.x.abs() + x.abs() / 2 + _FLUSHED

        b = number(other)
        x = self.x / b.x
        return self._with(b, "/", x, errors)

    def __radd__(self, other: float) -> Number:
        return number(other) + self

    def __rmul__(self, other: float) -> Number:
        return number(other) * self

    def __rtruediv__(self, other: float) -> Number:
        return number(other) / self

    def __neg__(self) -> Number:
        words, digits = self._inside(_ATOM)
        return replace(self, x=-self.x, words=f"−{words}", digits=f"−{digits}", binds=_ATOM)

    def __pow__(self, power: int) -> Number:
        made = self
        for _ in range(power - 1):
            made = made * self
        (words, digits), sign = self._inside(_ATOM), " ¹²³"[power]
        return replace(
            self, x=made.x, off=made.off, words=words + sign, digits=digits + sign, binds=_ATOM
        )

    def map(self, words: str, of: Of, slope: Of | None = None, error: Of | None = None) -> Number:
        """A function of it, written as `words`.

        Without a `slope` it is exact, and nowhere steeper than 1. `error`: its own error in eps, if
        not one eps of the result.
        """
        x, off = of(self.x), self.off
        if off is not None and slope is not None:
            off = off * slope(self.x).abs() + (x.abs() if error is None else error(self.x))
            off = off + _FLUSHED
        words, digits = words.format(self.words), words.format(self.digits)
        return replace(self, x=x, off=off, words=words, digits=digits, binds=_ATOM)

    def line(self, name: str = "", *, digits: bool = True) -> Number:
        """The number on a line of its own, as `name`, or as its formula; optionally with digits."""
        if self.x.ndim:  # lines are shown of single numbers only
            return self
        words = f"{name} = {self.words}" if name else self.words
        made = replace(self, words=words).facts()[-1] if digits else fact(words, float(self.x))
        binds, lines = _ATOM if name else self.binds, (*self.lines, made)
        return replace(leaf(made.value, name or self.words), binds=binds, off=self.off, lines=lines)

    def facts(self) -> tuple[Fact, ...]:
        """All lines; the last one gives the number."""
        if self.digits != "{}":
            line = fact(f"{self.words} = {self.digits}", float(self.x), *self.parts)
            return (*self.lines, line)
        return self.lines or (fact(self.words, float(self.x)),)


def fact(formula: str, value: float, *parts: float) -> Fact:
    """A line: `formula` has a `{}` for each of `parts`, and gives `value`."""
    return Fact(formula=formula, parts=parts, value=value)


def leaf(x: float, words: str) -> Number:
    """A number that others are made of."""
    return Number(x=torch.tensor(x, dtype=torch.float64), words=words, parts=(x,))


def constant(x: float, words: str = "") -> Number:
    """A number that stands for itself, such as `√2` or `1.702`; one of many digits is a part."""
    if not words and float(f"{x:g}") != x:
        return leaf(x, f"{x:g}")
    words = words or f"{x:g}"
    return Number(x=torch.tensor(x, dtype=torch.float64), words=words, digits=words)


def number(x: Number | float) -> Number:
    """A factor or summand of a formula."""
    return x if isinstance(x, Number) else constant(x)


def exp(x: Number) -> Number:
    """`e^x`; half an eps of the exponent is a relative error of the result."""
    words = "e^{}" if x.binds == _ATOM else "e^({})"
    return x.map(words, torch.exp, torch.exp, lambda x: torch.exp(x) * (1 + x.abs()) / 2)


def tanh(x: Number) -> Number:
    """The hyperbolic tangent."""
    return x.map("tanh({})", torch.tanh, lambda x: 1 - torch.tanh(x) ** 2)


def root(x: Number, eps: float) -> Number:
    """`√(x + ε)` of a single number."""
    inside = x + replace(constant(eps, "ε"), digits=f"{eps:g}")
    return inside.map("√({})", lambda x: x.new_tensor(math.sqrt(x)))


def softplus(x: Number) -> Number:
    """`ln(1 + e^x)`."""
    made = x.map("ln(1 + e^{})", lambda x: torch.logaddexp(x, EXACT), torch.sigmoid)
    return made.line(f"softplus({x.words})", digits=False)


def clip(x: Number, low: float, high: float) -> Number:
    """The nearest number between bounds."""
    words = f"clip({{}}, {low:g}, {high:g})" if low != -high else f"clip({{}}, ±{high:g})"
    if math.inf in (-low, high):
        words = f"min({{}}, {high:g})" if high < math.inf else f"max({{}}, {low:g})"

    def clipped(x: Tensor) -> Tensor:
        x = torch.where(x < low, low, x)
        return torch.where(x > high, high, x)

    return x.map(words, clipped)


def sigmoid(x: Number) -> Number:
    """`σ(x) = 1 / (1 + e^−x)`."""
    return (1 / (1 + exp(-x))).line(f"σ({x.words})", digits=False)


def _gelu(x: Number) -> Number:
    """`x Φ(x)`, Φ of the normal distribution.

    The erf of PyTorch's float32 kernel is a rational function, off by up to 5.3 eps where it is
    close to 1 (measured: PyTorch 2.13, AVX-512).
    """
    inside = x / constant(math.sqrt(2), "√2")
    slope = constant(2 / math.sqrt(math.pi)).x
    erf = inside.map(
        "erf({})",
        torch.erf,
        lambda x: slope * torch.exp(-x * x),
        lambda x: torch.where(x.abs() < 1, torch.erf(x).abs(), 6),
    )
    return x * ((1 + erf) / 2).line(f"Φ({x.words})", digits=False)


def _gelu_tanh(x: Number) -> Number:
    """GELU with a tanh for Φ (Hendrycks and Gimpel 2016)."""
    u = constant(math.sqrt(2 / math.pi), "√(2/π)") * (x + 0.044715 * x**3)
    return x * (1 + tanh(u.line("u", digits=False))) / 2


ACTIVATIONS: Mapping[Activation, Callable[[Number], Number]] = {
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: clip(x, 0, math.inf),
    "relu2": lambda x: clip(x, 0, math.inf) ** 2,
}
