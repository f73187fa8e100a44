"""The rule of every activation of a model, in the letters of the documents."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llmcli.anatomy.graph import graph
from llmcli.config import ModelConfig
from llmcli.graph.evaluation import rules as evaluation
from llmcli.graph.evaluation.rule import Rule


@lru_cache(maxsize=8)  # a view asks layer by layer
def rules(config: ModelConfig) -> Mapping[str, Rule[Any]]:
    """Name → rule, in execution order."""
    model = graph(config)
    return evaluation.rules(model.nodes.values(), model.letter)
