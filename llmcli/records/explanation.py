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
    """One term of a sum: `at` is what the sum runs over, `label` the token or part that it is.

    `value` is the product of `parts`, or what the sum's formula makes of them.
    """

    at: int
    parts: tuple[float, ...]
    value: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Sum:
    """What the terms of a step are: `Σᵢ T¹[7,i] · W_q[i,132]`, over `over`, and their sum.

    `columns` name the parts of a term and, where it is more than their product, its value.
    """

    formula: str
    over: str
    columns: tuple[str, ...]
    value: float
