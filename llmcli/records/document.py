"""Reports as JSON documents: the fields and properties of a dataclass that are included."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

# metadata of a field that only the screen needs: `field(metadata=APART)`
APART = {"apart": True}
# metadata of a field that the document leaves out while it has its default
OPTIONAL = {"optional": True}


if TYPE_CHECKING:
    derived = property  # so that its type is known, which it is not of a subclass
else:

    class derived(property):
        """A property included in the document after the fields: `ok`, `tokens_per_s`."""


def members(value: Any) -> dict[str, Any]:
    """The document's members of a dataclass by name: fields except `APART`, and `derived`.

    `OPTIONAL` fields are omitted if they have their default. Derived properties of base classes
    come before those of the class itself.
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
