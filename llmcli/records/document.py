"""A report is its document: which of a dataclass is in the JSON, under the names that it has."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

# metadata of a field that only the screen needs: `field(metadata=APART)`
APART = {"apart": True}
# metadata of a field that the document leaves out while it has its default
OPTIONAL = {"optional": True}


class derived(property):
    """A property that is in the document too, after the fields: `ok`, `tokens_per_s`."""


def members(value: Any) -> dict[str, Any]:
    """What the document has of a dataclass, by name: its fields but those `APART`, and `derived`.

    `OPTIONAL` ones are left out where they have their default. A derived one of a base class is
    there too, and before those of the class itself.
    """
    names = [
        one.name
        for one in fields(value)
        if not one.metadata.get("apart")
        and not (one.metadata.get("optional") and getattr(value, one.name) == one.default)
    ]
    for kind in reversed(type(value).__mro__):
        names += [name for name, one in vars(kind).items() if isinstance(one, derived)]
    return {name: getattr(value, name) for name in dict.fromkeys(names)}
