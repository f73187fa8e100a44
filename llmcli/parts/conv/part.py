"""Registers the gated short convolution as a part, with its memory."""

from __future__ import annotations

from llmcli.graph.workspace import Reading, Workspace
from llmcli.parts.conv.config import ShortConvConfig
from llmcli.parts.conv.graph import conv_facts, conv_graph
from llmcli.parts.part import Part


def _workspace(c: ShortConvConfig, of: Reading) -> Workspace:
    """The stream, its norm, three projections, and the convolution's sums."""
    own = of.rows * of.width * (6 * of.size + 4 * of.wide)
    # and the rows of the state
    before = of.batch * (c.length - 1) * of.width * (of.size + of.wide)
    product = of.product(of.width, 3 * of.width) + of.widened(3 * of.width)
    return Workspace(peak=own + before + product)


PART = Part(
    config=ShortConvConfig, prefix="conv", noun="the short convolution", mixes=True,
    gives="out_raw", graph=conv_graph, workspace=_workspace, facts=conv_facts,
    forward="llmcli.parts.conv.forward:ShortConv",
)  # fmt: skip
