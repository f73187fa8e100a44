"""The kinds of parts, by their folders. What a part is to others is in its folder.

`config.py` says what it is, `graph.py` its tensors, `forward.py` computes it, `part.py` is what
stands here; where they are long, `workspace.py` is the memory that it takes, and `evaluation.py`
has the functions of its `Opaque` operations.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from llmcli.parts.part import Part

_FOLDERS = ("attention", "conv", "delta", "experts", "latent", "mlp", "ple", "ssm")

PARTS: dict[type, Part] = {
    part.config: part
    for part in (import_module(f"llmcli.parts.{folder}.part").PART for folder in _FOLDERS)
}


def part_of(config: object) -> Part:
    """The part that a configuration is of. Raises KeyError where it is of none."""
    return PARTS[type(config)]


def forward_of(config: object, name: str, parameters: object) -> Any:
    """What computes the part: claims its parameters, and is called by the block."""
    module, _, made = part_of(config).forward.partition(":")
    return vars(import_module(module))[made](config, name, parameters)
