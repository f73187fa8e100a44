"""What of a dataclass is in its document, and numbers as people write them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from llmcli.records.document import APART, FLAT, OPTIONAL, derived, members
from llmcli.records.numbers import counted, spans


@dataclass(frozen=True, kw_only=True)
class Place:
    city: str
    code: int = field(metadata=APART)

    @derived
    def short(self) -> str:
        """The first letter."""
        return self.city[0]


@dataclass(frozen=True, kw_only=True)
class Person:
    name: str
    place: Place | None = field(default=None, metadata=FLAT)
    traits: dict[str, int] = field(default_factory=dict, metadata=FLAT)
    note: str = field(default="", metadata=OPTIONAL)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"name": "x"}),
        ({"note": "y", "traits": {"age": 3}}, {"name": "x", "age": 3, "note": "y"}),
        ({"place": Place(city="Rome", code=1)}, {"name": "x", "city": "Rome", "short": "R"}),
    ],
)
def test_members_are_flat_optional_derived_and_apart(given, found):
    assert members(Person(name="x", **given)) == found


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7"), ((4, 5), "4-5")],
)
def test_spans(numbers, text):
    assert spans(numbers) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 tensors"), (1, "1 tensor"), (1200, "1,200 tensors")]
)
def test_counted(number, text):
    assert counted(number, "tensor") == text
