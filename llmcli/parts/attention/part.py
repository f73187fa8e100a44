"""Registers attention as a part."""

from __future__ import annotations

from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.attention.graph import attention_facts, attention_graph
from llmcli.parts.attention.workspace import attention_workspace
from llmcli.parts.part import Part

PART = Part(
    config=AttentionConfig, prefix="attn", noun="attention", mixes=True,
    graph=attention_graph, workspace=attention_workspace, facts=attention_facts,
    forward="llmcli.parts.attention.forward:Attention",
)  # fmt: skip
