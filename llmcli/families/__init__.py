"""Families translate a checkpoint's configuration and tensor names into ours. No torch."""

from llmcli.families.family import (
    describe,
    families,
    find,
    ignored_metadata,
    planned,
    translate,
)
from llmcli.families.record import Family

__all__ = [
    "Family",
    "describe",
    "families",
    "find",
    "ignored_metadata",
    "planned",
    "translate",
]
