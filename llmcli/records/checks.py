"""The checks in a view's footer, each with its value and tolerance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ViewCheck:
    """A check described by `words`; it fails if `value` exceeds `tolerance`.

    NaN fails too. `where`: the place of the worst difference, or empty.
    """

    name: str
    words: str
    value: float
    tolerance: float
    where: str = ""

    @property
    def ok(self) -> bool:
        """Whether the value is within tolerance."""
        return self.value <= self.tolerance


def checks_document(checks: Iterable[ViewCheck]) -> dict[str, dict[str, object]]:
    """The `checks` object of a JSON document, by name."""
    return {
        check.name: {
            "ok": check.ok,
            "value": check.value,
            "tolerance": check.tolerance,
            "words": check.words,
            "where": check.where or None,
        }
        for check in checks
    }


def difference(name: str, words: str, wrong: Sequence[str]) -> ViewCheck:
    """A check that `wrong` is empty; its first entry is the place."""
    where = wrong[0] if wrong else ""
    return ViewCheck(name=name, words=words, value=float(len(wrong)), tolerance=0.0, where=where)
