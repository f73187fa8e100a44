"""Reports as JSON documents: the members of a dataclass that are included, and its checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

# metadata of a field that only the screen needs: `field(metadata=APART)`
APART = {"apart": True}
# metadata of a field that the document leaves out while it has its default
OPTIONAL = {"optional": True}
# metadata of a field (dataclass, mapping or None) whose own members stand in its place
FLAT = {"flat": True}


if TYPE_CHECKING:
    derived = property  # so that its type is known, which it is not of a subclass
else:

    class derived(property):
        """A property included in the document after the fields: `ok`, `tokens_per_s`."""


@cache
def member_metadata(kind: type) -> Mapping[str, Mapping[str, Any]]:
    """The members of a dataclass in a document: the metadata of each field, with its `default`.

    Fields except `APART`, then `derived` properties without any, those of base classes first.
    """
    found = {
        one.name: {**one.metadata, "default": one.default}
        for one in fields(kind)
        if not one.metadata.get("apart")
    }
    for base in reversed(kind.__mro__):
        found |= {name: {} for name, one in vars(base).items() if isinstance(one, derived)}
    return found


def members(value: Any) -> dict[str, Any]:
    """The members of a dataclass in a document, without `OPTIONAL` ones that have their default."""
    kind: Any = type(value)
    found: dict[str, Any] = {}
    for name, metadata in member_metadata(kind).items():
        member = getattr(value, name)
        if metadata.get("flat"):
            found |= members(member) if is_dataclass(member) else member or {}
        elif not metadata.get("optional") or member != metadata["default"]:
            found[name] = member
    return found


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


class Checked:
    """A report that is right if its checks hold; a base of dataclasses that have this field."""

    checks: tuple[ViewCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)


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


def zero_counts(name: str, words: str, counts: Mapping[str, int]) -> ViewCheck:
    """A check that all `counts`, by place, are 0; `where` is the place of the largest."""
    worst = max(counts, key=counts.__getitem__, default="")
    where = worst if counts.get(worst) else ""
    total = float(sum(counts.values()))
    return ViewCheck(name=name, words=words, value=total, tolerance=0.0, where=where)
