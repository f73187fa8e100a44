"""Registers the mixture of experts as a part."""

from __future__ import annotations

from llmcli.parts.experts.config import ExpertsConfig
from llmcli.parts.experts.graph import experts_facts, experts_graph
from llmcli.parts.experts.workspace import experts_workspace
from llmcli.parts.part import Part

PART = Part(
    config=ExpertsConfig, prefix="moe", noun="the mixture of experts", mixes=False,
    graph=experts_graph, workspace=experts_workspace, facts=experts_facts,
    forward="llmcli.parts.experts.forward:Experts",
    reads_stream=lambda config: config.routing.norm is not None,
)  # fmt: skip
