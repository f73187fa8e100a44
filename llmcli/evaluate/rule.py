"""Base of the rules: evaluate an activation as a tensor or number by number, in float64.

Letters: T tokens (the documents' n), S keys, D width (d), H heads (h), K key/value heads, d size
of a head's query and key (d/h), e of its value, F hidden, V vocabulary (v). Without a batch axis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from llmcli.evaluate.numbers import Number, leaf
from llmcli.graph.node import Node
from llmcli.graph.ops import Letter, Op
from llmcli.records.explanation import Cell, Element, Fact, Sum, Term


class Numbers(Protocol):
    """Inputs of a rule: rows of activations in float64 on the CPU, and weights.

    `numbers[name]` has the rows of the tokens at `positions`. `alone`: for every position, whether
    its row was the only one in the op's call. `dtype`: of the kernel's arithmetic; `eps`: its
    rounding; `least`: magnitude that the kernel may flush to 0.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    positions: tuple[int, ...]
    alone: tuple[bool, ...]
    dtype: torch.dtype
    eps: float
    least: float

    def __getitem__(self, name: str) -> Tensor:
        """The rows of an activation at `positions`."""
        ...

    def every(self, name: str, rows: slice = slice(None)) -> Tensor:
        """All rows (or `rows`) of keys or values, independent of `positions`."""
        ...

    def kernel(self, name: str, *index: int) -> Tensor:
        """The activation computed by the decoder, or the row or number of it with that index."""
        ...

    def read(self, name: str, weight: str) -> Tensor:
        """The input of a product as its kernel reads it, `[T, K]`; heads are concatenated."""
        ...

    def rounded(self, weight: str) -> int:
        """Bits to which products with this matrix round their input; 0: not rounded."""
        ...

    def weight(self, name: str) -> Tensor:
        """A parameter in the formula's orientation, with its dtype and device."""
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
        """The maximum difference to the kernel's numbers for an input with these magnitudes."""
        ...

    def table_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a table, float64 on the CPU."""
        ...

    def vector(self, name: str) -> Tensor:
        """A parameter that is a vector, float64 on the CPU."""
        ...

    def origin(self, name: str) -> str:
        """The source of a parameter, for display."""
        ...

    def at(self, position: int) -> Numbers:
        """The same with the row of one token, which is among `positions`."""
        ...

    def length(self, position: int) -> int:
        """The length of the sequence when the token at `position` was computed."""
        ...


AnyOp = TypeVar("AnyOp", bound=Op)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The running index of a row from `first` to `end`, as formulas write it: `i`, `64+i`."""

    over: str = "i"
    first: int = 0
    end: int | None = None

    def __str__(self) -> str:
        return f"{self.first}+{self.over}" if self.first else self.over


@dataclass(frozen=True, kw_only=True)
class Row:
    """Numbers along one axis of a tensor: `words` is their symbol, with `over` for the index.

    `cells`: the numbers of activations at a place in the row, none of a parameter.
    """

    numbers: Sequence[float]
    words: str
    over: str = "i"
    cells: Callable[[int], tuple[Cell, ...]] = lambda at: ()


class Reader:
    """Reads the inputs of a formula: whole tensors, or the numbers of the result at `index`.

    `off`: the error of the inputs, if errors are to be computed. With an index it collects the
    derivation: `note`, lines `before` the sum, its `terms`, and in `follow` the inputs that matter
    most, in order. `size`: Σ|terms| + |bias| of a dot product.
    """

    note = ""
    before: tuple[Fact, ...] = ()
    sum: Sum | None = None
    terms: tuple[Term, ...] = ()
    size = 0.0

    def __init__(
        self,
        rule: Rule[Any],
        values: Numbers,
        index: tuple[int, ...] = (),
        off: Tensor | None = None,
    ) -> None:
        self.rule = rule
        self.values = values
        self.index = index
        self.off = off
        self.follow: list[Cell] = []

    def __call__(self, name: str, *item: int) -> Number:
        """An activation, or `item` of it; with an index the number there."""
        x = self.values[name][item]
        if not self.index:
            return Number(x=x, off=self.off)
        at = place(self.index, x)
        return self._followed(x[at], name, *item, *at)

    def at(self, name: str, *index: int) -> Number:
        """One number of an activation, to be followed."""
        return self._followed(self.values[name][index], name, *index)

    def _followed(self, x: Tensor, name: str, *index: int) -> Number:
        self.follow.append((name, index))
        return self.rule.leaf(x, name, *index)

    def parameter(self, name: str, *, by_head: bool = False) -> Number:
        """A vector, with a number for every column or for every head of `[H, T, d]`; a scalar."""
        x = self.values.vector(name)
        column = x[:, None, None] if by_head else x
        if not self.index:
            return Number(x=column, off=self.off)
        at = place(self.index, column)[: x.ndim]
        return self.rule.leaf(x[at], name, *at)

    def stored(self, name: str, *index: int) -> Number:
        """One number of a small parameter."""
        return self.rule.leaf(self.values.vector(name)[index], name, *index)

    def row(self, name: str, *index: int | Axis, x: Tensor | None = None, note: str = "") -> Row:
        """The numbers of an activation or parameter along the `Axis` in `index`.

        `x`: the numbers, if not those of the activation; `note`, after the symbol: how a product
        reads them.
        """

        def cells(at: int) -> tuple[Cell, ...]:
            if name not in self.rule.rules:
                return ()
            return ((name, tuple(i.first + at if isinstance(i, Axis) else i for i in index)),)

        if x is None:
            places = (slice(i.first, i.end) if isinstance(i, Axis) else i for i in index)
            x = self.values[name][tuple(places)]
        (over,) = (at.over for at in index if isinstance(at, Axis))
        words = self.rule.cell(name, *index) + note
        return Row(numbers=x.tolist(), words=words, over=over, cells=cells)

    def dot(self, x: Row, y: Row, bias: Number | None = None, labels: Sequence[str] = ()) -> Number:
        """The sum of the products of two rows, plus a bias."""
        terms = products(x.numbers, y.numbers, labels)
        at = largest(terms).at
        self.follow += (*x.cells(at), *y.cells(at))
        made = self.summed(f"{x.words} · {y.words}", terms, x.over, (x.words, y.words, "product"))
        self.size = math.fsum(abs(term.value) for term in terms)
        if bias is None:
            return made
        self.size += float(bias.x.abs())
        return made + bias

    def squares(self, x: Sequence[float], cell: str, mean: float | None = None) -> Number:
        """The sum of squares of numbers with the symbol `cell`; less the mean if given."""
        centred = x if mean is None else [number - mean for number in x]
        parts = [(c,) if mean is None else (a, c) for a, c in zip(x, centred, strict=True)]
        columns = (cell,) if mean is None else (cell, f"{cell} − μ")
        squared = f"{cell}²" if mean is None else f"({cell} − μ)²"
        terms = tuple(Term(at=i, parts=p, value=p[-1] ** 2) for i, p in enumerate(parts))
        return self.summed(squared, terms, "i", (*columns, squared))

    def summed(
        self, formula: str, terms: tuple[Term, ...], over: str, columns: tuple[str, ...] = ()
    ) -> Number:
        """The sum of the terms, rounded once."""
        value = math.fsum(term.value for term in terms)
        self.sum = Sum(formula=formula, over=over, columns=columns or (formula,), value=value)
        self.terms = terms
        return leaf(value, "Σ")

    def element(self, made: Number) -> Element:
        """The derivation of the number; one without words has no lines."""
        bare = made.words in ("", "Σ") and not made.lines
        return Element(
            value=float(made.x),
            note=self.note,
            before=self.before,
            sum=self.sum,
            terms=self.terms,
            after=() if bare else made.facts(),
            follow=tuple(self.follow),
        )


class Rule(ABC, Generic[AnyOp]):
    """Evaluates an activation, derives its numbers and bounds its rounding errors.

    `letter`: its symbol in formulas; `letter_of`: the symbol of any other; `rules`: those of the
    whole model.
    """

    op: AnyOp

    def __init__(self, node: Node, letter_of: Letter, rules: Mapping[str, Rule[Any]]) -> None:
        self.node = node
        self.op = cast("AnyOp", node.op)
        self.letter_of = letter_of
        self.rules = rules
        self.letter = node.letter

    @property
    def formula(self) -> str:
        """The formula, such as `Q = T¹ W_q + b_q`."""
        own = self.node.formula_letter or self.node.letter
        return self.op.formula(own, self.letter_of) + self.node.aside

    def cell(self, name: str, *index: int | str | Axis) -> str:
        """The symbol of a number of another activation or parameter: `Q[2,7,4]`."""
        return symbol(self.letter_of(name), *index)

    def leaf(self, x: Tensor | float, name: str, *index: int) -> Number:
        """A number of another activation or parameter."""
        return leaf(float(x), self.cell(name, *index))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The activations that this one is computed from."""
        return self.op.inputs

    @abstractmethod
    def tensor(self, values: Numbers) -> Tensor:
        """The whole activation in float64 on the CPU, from `values[input]` and the weights."""

    @abstractmethod
    def _compute(self, read: Reader) -> Number:
        """The formula of the number at `read.index`."""

    def element(self, values: Numbers, index: tuple[int, ...]) -> Element:
        """The number at `index` with every step of its arithmetic."""
        read = Reader(self, values, index)
        return read.element(self._compute(read))

    @abstractmethod
    def magnitudes(self, values: Numbers) -> Tensor:
        """Σ|terms| + |bias| of each number, or an equivalent bound.

        A kernel that computes only this formula has an error of some eps times it, independent of
        cancellation, and none where it is 0. Broadcastable to the shape of `tensor`.
        """

    def bound(self, values: Numbers, index: tuple[int, ...]) -> float:
        """The magnitude of the number at `index`, from the rows of its token alone."""
        found = self.magnitudes(values.at(index[-2]))
        return float(found[place((*index[:-2], 0, index[-1]), found)])

    def halves(self, values: Numbers, result: Tensor) -> Tensor:
        """The sum of the magnitudes that a kernel rounds to 16 bits, each by half an eps.

        Sums are in float32, so these are the `result` and intermediate values that are stored.
        """
        return result.abs()

    def magnitude(self, values: Numbers, index: tuple[int, ...]) -> float:
        """The magnitude of the numbers whose rounding errors enter this one: the row's maximum.

        At least `values.least`, even if the kernel's row is 0.
        """
        return float(values.kernel(self.node.name, *index[:-1]).abs().max()) + values.least


class Exact(Rule[AnyOp]):
    """Numbers that no kernel rounds: copies of others, or integers."""

    def magnitudes(self, values: Numbers) -> Tensor:
        """Zero."""
        return torch.zeros(1, dtype=torch.float64)


def symbol(letter: str, *index: object) -> str:
    """`Q[2,7,4]`; without an index the letter alone."""
    return f"{letter}[{','.join(map(str, index))}]" if index else letter


def place(index: tuple[int, ...], x: Tensor) -> tuple[int, ...]:
    """The index of `x`, which broadcasts, for the number at `index` of the result."""
    own = zip(index[len(index) - x.ndim :], x.shape, strict=True)
    return tuple(min(i, size - 1) for i, size in own)


def products(
    x: Sequence[float], y: Sequence[float], labels: Sequence[str] = ()
) -> tuple[Term, ...]:
    """The terms of a dot product."""
    rows = zip(x, y, labels or [""] * len(x), strict=True)
    return tuple(
        Term(at=at, parts=(a, b), value=a * b, label=label) for at, (a, b, label) in enumerate(rows)
    )


def largest(terms: Sequence[Term]) -> Term:
    """The term that contributes most."""
    return max(terms, key=lambda term: abs(term.value))


def ordinal(number: int) -> str:
    """`1st`, `2nd` … of a place counted from 0."""
    teens = (number + 1) % 100 in (11, 12, 13)
    end = "th" if teens else {1: "st", 2: "nd", 3: "rd"}.get((number + 1) % 10, "th")
    return f"{number + 1}{end}"


def settled(x: Tensor, rounded: Tensor, theirs: Tensor, off: Tensor | float) -> Tensor:
    """`rounded`, or the kernel's rounding `theirs` where it is valid for x within `off`.

    Numbers an ulp apart may round to different neighbours. A derivation follows the kernel's choice
    only where it is as good as its own. `theirs` is the rounding of a number within `off` of x,
    with a step that differs as little: at most 3 · off worse.
    """
    return torch.where((x - theirs).abs() <= (x - rounded).abs() + 3 * off, theirs, rounded)


def concatenated(x: Tensor) -> Tensor:
    """`[H, T, e]` → `[T, H·e]`; a matrix stays as it is."""
    return x if x.ndim == 2 else torch.cat(list(x), dim=-1)


def exact(tensor: Tensor) -> Tensor:
    """A float64 copy on the CPU."""
    return tensor.detach().to("cpu", torch.float64, copy=True)
