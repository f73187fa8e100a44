"""What a view says of itself: the checks in its footer, each with the number it is decided by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ViewCheck:
    """`words` say what holds; `value` is how far it is off, and more than `tolerance` is wrong.

    A NaN is wrong too. `where`: the place of the worst difference, empty where it has none.
    """

    name: str
    words: str
    value: float
    tolerance: float
    where: str = ""

    @property
    def ok(self) -> bool:
        """Whether it holds."""
        return self.value <= self.tolerance


def checks_document(checks: Iterable[ViewCheck]) -> dict[str, dict[str, object]]:
    """`checks` of a JSON document, by name."""
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
    """A check that nothing is wrong; the first of what is."""
    where = wrong[0] if wrong else ""
    return ViewCheck(name=name, words=words, value=float(len(wrong)), tolerance=0.0, where=where)
