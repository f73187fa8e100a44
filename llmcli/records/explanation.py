"""The arithmetic of one number: lines of it, and the terms of a sum."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmcli.records.document import APART

Cell = tuple[str, tuple[int, ...]]  # a number: the tensor and the index


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of arithmetic: `formula` has a `{}` for each of `parts`, and gives `value`."""

    formula: str
    parts: tuple[float, ...]
    value: float


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term of a sum: `at` is its index, `label` its token or part.

    `value` is the product of `parts`, or the value of the sum's formula.
    """

    at: int
    parts: tuple[float, ...]
    value: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A sum over `over`, such as `Σᵢ T¹[7,i] · W_q[i,132]`, and its value.

    `columns` name the parts of a term and, if it is not simply their product, its value.
    """

    formula: str
    over: str
    columns: tuple[str, ...]
    value: float


@dataclass(frozen=True, kw_only=True)
class Element:
    """One number and its arithmetic: `before`, the `terms` of `sum`, and `after`.

    `origins`: what was added up to it, block by block. `magnitude`: Σ|terms|, see
    `Rule.magnitudes`; 0 if nothing is rounded. `follow`: the most important inputs, in order.
    """

    value: float
    magnitude: float = field(metadata=APART)
    note: str = ""
    before: tuple[Fact, ...] = ()
    sum: Sum | None = None
    terms: tuple[Term, ...] = ()
    after: tuple[Fact, ...] = ()
    origins: tuple[Term, ...] = ()
    follow: tuple[Cell, ...] = field(default=(), metadata=APART)
