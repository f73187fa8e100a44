"""The interface of a part, implemented in its folder's `part.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.graph.node import PartGraph, Site
from llmcli.graph.workspace import Reading, Workspace


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kind of part, identified by the type of its configuration (`config`).

    `prefix`: of its tensors' names in a block (`blocks.3.attn.q`); `noun`: for messages. `mixes`:
    tokens depend on each other, so it has a state; otherwise tokens are independent. `graph(config,
    site)` describes its tensors, `workspace(config, reading)` its memory, `facts(config)` provides
    facts for `info`. `forward` is `module:callable`, imported when a decoder is built, since it
    needs torch; `callable(config, name, parameters)` returns the part, which is called with the
    residual stream too if `reads_stream(config)`. `gives`: the leaf name of the output before a
    norm or multiplier, distinct from its other tensors. `foreign`: lines of
    `anatomy.aliases._FOREIGN`, suggestions for other programs' names.
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
    foreign: str = ""
    reads_stream: Callable[[Any], bool] = lambda config: False
