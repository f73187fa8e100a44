"""One number: the lines of its arithmetic, the terms of a sum, and the kernel's own beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from llmcli.records.document import APART, ViewCheck
from llmcli.records.document import derived as member

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

    `origins`: what was added up to it, block by block. `follow`: the most important inputs, in
    order.
    """

    value: float
    note: str = ""
    before: tuple[Fact, ...] = ()
    sum: Sum | None = None
    terms: tuple[Term, ...] = ()
    after: tuple[Fact, ...] = ()
    origins: tuple[Term, ...] = ()
    follow: tuple[Cell, ...] = field(default=(), metadata=APART)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A number that formulas (its field `BY_FORMULAS`) and the fast kernel (`kernel`) compute."""

    BY_FORMULAS: ClassVar[str] = "derived"
    kernel: float
    tolerance: float

    @member
    def difference(self) -> float:
        """Distance of the two; −∞ of a mask is equal to itself."""
        ours: float = getattr(self, self.BY_FORMULAS)
        return 0.0 if ours == self.kernel else abs(ours - self.kernel)

    @member
    def ok(self) -> bool:
        """Whether the difference is within tolerance."""
        return self.difference <= self.tolerance

    @property
    def share(self) -> float:
        """The difference as a share of the tolerance, 0 of equal numbers."""
        if not self.difference:
            return 0.0
        return self.difference / self.tolerance if self.tolerance else self.difference * math.inf

    def view_check(self, name: str, words: str, *, where: str = "") -> ViewCheck:
        """The check for the view."""
        value, tolerance = self.difference, self.tolerance
        return ViewCheck(name=name, words=words, value=value, tolerance=tolerance, where=where)


@dataclass(frozen=True, kw_only=True)
class NumberCheck(Compared):
    """The number at `name[index]`, `derived` from the inputs of its formula."""

    name: str
    index: tuple[int, ...]
    derived: float
