"""The arithmetic of one number: lines of it, and the terms of a sum."""

from __future__ import annotations

from dataclasses import dataclass


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
