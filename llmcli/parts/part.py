"""What a kind of part is to others. Its folder says it in `part.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.graph.node import PartGraph, Site
from llmcli.graph.workspace import Reading, Workspace


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kind of part: what `config` is, the type of its configuration.

    `prefix` is the name of its tensors in a block (`blocks.3.attn.q`), `noun` what it is called.
    `mixes`: tokens see each other in it, so that it has a state; else each is computed alone.
    `graph(config, site)` gives its rows, `workspace(config, reading)` the memory that it takes,
    `facts(config)` what `info` says of it (`reports.info.LayerType`). `forward` names
    `module:callable`, imported when a decoder is built, for it needs torch:
    `callable(config, name, parameters)`; where `reads_stream(config)`, what it makes is called with
    the residual stream, too. `gives`: the leaf of what it makes, where a norm or a multiplier
    comes before that is added; another name than those of its own tensors.
    """

    config: type
    prefix: str
    noun: str
    mixes: bool
    graph: Callable[[Any, Site], PartGraph]
    workspace: Callable[[Any, Reading], Workspace]
    facts: Callable[[Any], Mapping[str, Any]]
    forward: str
    gives: str = "out"
    reads_stream: Callable[[Any], bool] = lambda config: False
