"""Registers Mamba-2 as a part, with its memory."""

from __future__ import annotations

from llmcli.graph.workspace import Reading, Workspace
from llmcli.parts.part import Part
from llmcli.parts.ssm.config import SsmConfig
from llmcli.parts.ssm.graph import ssm_facts, ssm_graph


def _workspace(c: SsmConfig, of: Reading) -> Workspace:
    """The stream, its norm, the projections, the convolution's output, and chunks of the scan."""
    columns = c.channels + c.inner + c.heads
    own = of.rows * (of.width * (of.size + of.wide) + (columns + 3 * c.channels) * of.size)
    own += of.rows * 4 * c.inner * of.wide
    return Workspace(peak=own + of.product(of.width, columns) + of.widened(columns))


PART = Part(
    config=SsmConfig, prefix="ssm", noun="the Mamba-2 mixer", mixes=True,
    gives="out_raw", graph=ssm_graph, workspace=_workspace, facts=ssm_facts,
    forward="llmcli.parts.ssm.forward:Ssm",
)  # fmt: skip
