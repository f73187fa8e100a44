"""Which part a configuration is of: one line for each kind of mixer and of feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmcli.config import AttentionConfig, MlpConfig
from llmcli.graph.node import PartGraph, Site
from llmcli.parts.attention.graph import attention_graph
from llmcli.parts.mlp.graph import mlp_graph

GRAPHS: dict[type, Callable[[Any, Site], PartGraph]] = {
    AttentionConfig: attention_graph,
    MlpConfig: mlp_graph,
}


def part_graph(config: object, site: Site) -> PartGraph:
    """The rows of a part. Raises KeyError for a configuration of no part."""
    return GRAPHS[type(config)](config, site)
