"""Each family translates its checkpoints' configuration and tensor names into ours. No torch."""

from llmcli.families.family import Family, describe, families, find, translate
from llmcli.families.rules import (
    Drop,
    Load,
    Op,
    Plan,
    Rename,
    Rows,
    Rule,
    Transpose,
    UnpairRows,
    plan,
    shape_after,
)

__all__ = [
    "Drop",
    "Family",
    "Load",
    "Op",
    "Plan",
    "Rename",
    "Rows",
    "Rule",
    "Transpose",
    "UnpairRows",
    "describe",
    "families",
    "find",
    "plan",
    "shape_after",
    "translate",
]
