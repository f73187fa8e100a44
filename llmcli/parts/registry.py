"""The kinds of parts: one line each. What a part is to others is in its folder.

`config.py` says what it is, `graph.py` its tensors, `workspace.py` the memory that it takes, and
`forward.py` computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from llmcli.graph.node import PartGraph, Site
from llmcli.graph.workspace import Reading, Workspace
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.attention.graph import attention_facts, attention_graph
from llmcli.parts.attention.workspace import attention_workspace
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.mlp.graph import mlp_facts, mlp_graph
from llmcli.parts.mlp.workspace import mlp_workspace


@dataclass(frozen=True)
class Part:
    """`prefix` is the name of its tensors in a block (`blocks.3.attn.q`), `noun` what it is called.

    `mixes`: tokens see each other in it, so that it has a state; else each is computed alone.
    `graph(config, site)` gives its rows, `workspace(config, reading)` the memory that it takes,
    `facts(config)` what `info` says of it (`reports.info.LayerType`). `forward` names
    `module:callable`, imported when a decoder is built, for it needs torch:
    `callable(config, name, parameters)`.
    """

    prefix: str
    noun: str
    mixes: bool
    graph: Callable[[Any, Site], PartGraph]
    workspace: Callable[[Any, Reading], Workspace]
    facts: Callable[[Any], Mapping[str, Any]]
    forward: str


PARTS: dict[type, Part] = {
    AttentionConfig: Part(
        "attn", "attention", True, attention_graph, attention_workspace, attention_facts,
        "llmcli.parts.attention.forward:Attention",
    ),
    MlpConfig: Part(
        "mlp", "the feed-forward", False, mlp_graph, mlp_workspace, mlp_facts,
        "llmcli.parts.mlp.forward:build_mlp",
    ),
}  # fmt: skip


def part_of(config: object) -> Part:
    """The part that a configuration is of. Raises KeyError where it is of none."""
    return PARTS[type(config)]


def forward_of(config: object, name: str, parameters: object) -> Any:
    """What computes the part: claims its parameters, and is called by the block."""
    module, _, made = part_of(config).forward.partition(":")
    return vars(import_module(module))[made](config, name, parameters)
