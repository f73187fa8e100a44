"""The registry of parts, by their folders.

`config.py` configures a part, `graph.py` describes its tensors, `forward.py` computes it, and
`part.py` is its entry here; optional `workspace.py` estimates its memory, and `evaluation.py` has
the functions of its `Opaque` ops.
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
    """The part of a configuration. Raises KeyError for an unknown type."""
    return PARTS[type(config)]


def forward_of(config: object, name: str, parameters: object) -> Any:
    """Build the callable part, which claims its parameters."""
    module, _, made = part_of(config).forward.partition(":")
    return vars(import_module(module))[made](config, name, parameters)
