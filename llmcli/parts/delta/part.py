"""Registers gated DeltaNet as a part, with its memory."""

from __future__ import annotations

from llmcli.graph.workspace import Reading, Workspace
from llmcli.parts.delta.config import DeltaConfig
from llmcli.parts.delta.graph import delta_facts, delta_graph
from llmcli.parts.part import Part


def _workspace(c: DeltaConfig, of: Reading) -> Workspace:
    """The stream, its norm, the projections, the convolution's output, and chunks of the scan."""
    columns = c.channels + c.heads * (c.value_dim + 2)
    values = c.heads * c.value_dim
    own = of.rows * (of.width * (of.size + of.wide) + (columns + 3 * c.channels) * of.size)
    own += of.rows * (2 * c.key_heads * c.key_dim + 3 * values) * of.wide
    return Workspace(peak=own + of.product(of.width, columns) + of.widened(columns))


PART = Part(
    config=DeltaConfig, prefix="linattn", noun="the gated DeltaNet", mixes=True,
    gives="out_raw", graph=delta_graph, workspace=_workspace, facts=delta_facts,
    forward="llmcli.parts.delta.forward:GatedDelta",
)  # fmt: skip
