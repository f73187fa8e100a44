"""What a rule is: how one activation follows from its inputs, as a tensor and number by number.

Letters: T tokens (the documents' n), S keys, D width (d), H heads (h), K key/value heads, d size
of a head's query and key (d/h), e of its value, F hidden, V vocabulary (v). Without a batch axis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from llmcli.reports.explanation import Fact, Sum, Term

if TYPE_CHECKING:
    from llmcli.explain.kernel import Kernel

Cell = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Element:
    """One number and its arithmetic; `follow` are the inputs that matter most, the first most.

    `magnitude`: Σ|terms|, as `Rule.magnitudes` has it for every number; 0 where nothing is rounded.
    """

    value: float
    magnitude: float
    note: str = ""
    before: tuple[Fact, ...] = ()
    sum: Sum | None = None
    terms: tuple[Term, ...] = ()
    after: tuple[Fact, ...] = ()
    origins: tuple[Term, ...] = ()
    follow: tuple[Cell, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """`letter` is what the documents call the activation, `formula` how they compute it."""

    letter: str
    formula: str

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """The activations that it is computed from."""

    @abstractmethod
    def tensor(self, values: Kernel) -> Tensor:
        """The whole activation in float64 on the CPU, from `values[input]` and the weights."""

    @abstractmethod
    def element(self, values: Kernel, index: tuple[int, ...]) -> Element:
        """The number at `index` with every step of its arithmetic."""

    @abstractmethod
    def magnitudes(self, values: Kernel) -> Tensor:
        """How large what is added up to each number is: Σ|terms|, and |bias|, or its equivalent.

        A kernel that computes this one formula rounds by so many eps of it, whatever cancels, and
        by nothing where it is 0. Can be broadcast to the shape of `tensor`.
        """

    def halves(self, values: Kernel, result: Tensor) -> Tensor:
        """What a kernel rounds to 16 bits in them, each by half an eps: the sum of the sizes.

        Sums are taken in float32, so that it is the `result` and what is written on the way.
        """
        return result.abs()

    def magnitude(self, values: Kernel, name: str, index: tuple[int, ...]) -> float:
        """How large the numbers are whose roundings end up in this one: the largest of its row.

        At least `values.least`, also where the kernel took the whole row for 0.
        """
        return float(values.kernel_row(name, index).abs().max()) + values.least


def symbol(letter: str, *index: int | str) -> str:
    """`Q[2,7,4]`; without an index the letter alone."""
    return f"{letter}[{','.join(map(str, index))}]" if index else letter


def products(xs: Sequence[float], ys: Sequence[float]) -> tuple[Term, ...]:
    """The terms of a dot product."""
    pairs = zip(xs, ys, strict=True)
    return tuple(Term(at=i, parts=(x, y), value=x * y) for i, (x, y) in enumerate(pairs))


def dot(columns: tuple[str, str], value: float, over: str = "i") -> Sum:
    """The sum of such products, over the numbers `i` of a row or over the keys `s`."""
    return Sum(formula=" · ".join(columns), over=over, columns=(*columns, "product"), value=value)


def total(terms: Sequence[Term]) -> float:
    """The sum of the terms, rounded once."""
    return math.fsum(term.value for term in terms)


def size(terms: Sequence[Term]) -> float:
    """The sum of their absolute values."""
    return math.fsum(abs(term.value) for term in terms)


def largest(terms: Sequence[Term]) -> Term:
    """The term that contributes most."""
    return max(terms, key=lambda term: abs(term.value))
