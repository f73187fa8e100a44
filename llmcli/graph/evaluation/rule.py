"""How an op is evaluated: the activation as a tensor, and number by number. In float64.

Letters: T tokens (the documents' n), S keys, D width (d), H heads (h), K key/value heads, d size
of a head's query and key (d/h), e of its value, F hidden, V vocabulary (v). Without a batch axis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from llmcli.graph.node import Node
from llmcli.graph.ops import Letter, Op
from llmcli.records.explanation import Fact, Sum, Term

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


class Numbers(Protocol):
    """What a rule reads: rows of activations in float64 on the CPU, and weights.

    `numbers[name]` has the rows of the tokens at `positions`. `alone` says for every position
    whether its row was the only one that the op was given. `eps` is the rounding of the kernel's
    `dtype`, and `least` the magnitude whose roundings it may take for 0.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    positions: tuple[int, ...]
    alone: tuple[bool, ...]
    eps: float
    least: float

    @property
    def dtype(self) -> torch.dtype:
        """The arithmetic of the kernel."""
        ...

    def __getitem__(self, name: str) -> Tensor:
        """The input of a formula."""
        ...

    def every(self, name: str, rows: slice = slice(None)) -> Tensor:
        """All rows of it, or those, whatever `positions` are: keys and values."""
        ...

    def kernel(self, name: str) -> Tensor:
        """What the decoder computed."""
        ...

    def kernel_row(self, name: str, index: tuple[int, ...]) -> Tensor:
        """The row of it in which the number at `index` stands."""
        ...

    def read(self, name: str, weight: str) -> Tensor:
        """The input of a product as its kernel reads it, `[T, K]`; heads lie side by side."""
        ...

    def rounded(self, weight: str) -> int:
        """To how many bits the input of products with that matrix is rounded; 0: to none."""
        ...

    def weight(self, name: str) -> Tensor:
        """A parameter in the formula's orientation, in its own dtype and place."""
        ...

    def columns(self, name: str, which: slice) -> Tensor:
        """Some columns of a matrix, `[K, n]`: float64 on the CPU, a copy."""
        ...

    def size(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        ...

    def expert(self, name: str, expert: int) -> Tensor:
        """The matrix of one expert, `[K, N]`: float64 on the CPU, a copy."""
        ...

    def uncertainty(self, name: str, magnitude: Tensor) -> Tensor:
        """How far numbers of an input may be from the kernel's, whose rows are that large."""
        ...

    def table_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a table, float64 on the CPU."""
        ...

    def vector(self, name: str) -> Tensor:
        """A parameter that is a vector, float64 on the CPU."""
        ...

    def origin(self, name: str) -> str:
        """Where a parameter comes from, for people."""
        ...

    def length(self, position: int) -> int:
        """How long the sequence was when the token at `position` was computed."""
        ...


AnyOp = TypeVar("AnyOp", bound=Op)


def in_bits(values: Numbers, weight: str) -> str:
    """` in 16 bits` where the input of products with that matrix is rounded to so many."""
    bits = values.rounded(weight)
    return f" in {bits} bits" if bits else ""


class Rule(ABC, Generic[AnyOp]):
    """How an activation is evaluated, how one number of it is derived, how far it may be rounded.

    `letter` is what the documents call it, `letter_of` gives that of any other, `rules` are those
    of the whole model.
    """

    op: AnyOp

    def __init__(self, node: Node, letter_of: Letter, rules: Mapping[str, Rule[Any]]) -> None:
        self.node = node
        self.op = cast("AnyOp", node.op)
        self.letter_of = letter_of
        self.rules = rules

    @property
    def letter(self) -> str:
        """`Q`."""
        return self.node.letter

    @property
    def formula(self) -> str:
        """`Q = T¹ W_q + b_q`."""
        own = self.node.formula_letter or self.node.letter
        return self.op.formula(own, self.letter_of) + self.node.aside

    def cell(self, name: str, *index: int | str) -> str:
        """A number of another activation, or of a parameter, in letters: `Q[2,7,4]`."""
        return symbol(self.letter_of(name), *index)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The activations that it is computed from."""
        return self.op.inputs

    @abstractmethod
    def tensor(self, values: Numbers) -> Tensor:
        """The whole activation in float64 on the CPU, from `values[input]` and the weights."""

    @abstractmethod
    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The number at `index` with every step of its arithmetic."""

    @abstractmethod
    def magnitudes(self, values: Numbers) -> Tensor:
        """How large what is added up to each number is: Σ|terms|, and |bias|, or its equivalent.

        A kernel that computes this one formula rounds by so many eps of it, whatever cancels, and
        by nothing where it is 0. Can be broadcast to the shape of `tensor`.
        """

    def halves(self, values: Numbers, result: Tensor) -> Tensor:
        """What a kernel rounds to 16 bits in them, each by half an eps: the sum of the sizes.

        Sums are taken in float32, so that it is the `result` and what is written on the way.
        """
        return result.abs()

    def magnitude(self, values: Numbers, name: str, index: tuple[int, ...]) -> float:
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


def ordinal(number: int) -> str:
    """`1st`, `2nd` … of a place counted from 0."""
    teens = (number + 1) % 100 in (11, 12, 13)
    end = "th" if teens else {1: "st", 2: "nd", 3: "rd"}.get((number + 1) % 10, "th")
    return f"{number + 1}{end}"


def settled(x: Tensor, rounded: Tensor, theirs: Tensor, off: Tensor | float) -> Tensor:
    """What `x` is `rounded` to; where x is within `off` of being rounded as `theirs` is: theirs.

    Rounding to few bits makes much of little: two numbers an ulp apart may become neighbours. Who
    derives a number that a kernel rounded takes the kernel's choice where it is as good as the own
    one, and only there. `theirs` is what a number within `off` of x is rounded to, in steps that
    differ by as little: that is at most 3 · off worse.
    """
    return torch.where((x - theirs).abs() <= (x - rounded).abs() + 3 * off, theirs, rounded)


def concatenated(x: Tensor) -> Tensor:
    """`[H, T, e]` → `[T, H·e]`; a matrix stays as it is."""
    return x if x.ndim == 2 else torch.cat(list(x), dim=-1)


def exact(tensor: Tensor) -> Tensor:
    """A copy of the same numbers in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64, copy=True)
