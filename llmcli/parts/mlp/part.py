"""Registers the feed-forward as a part, with its memory during prefill."""

from __future__ import annotations

from llmcli.graph.workspace import Reading, Workspace
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.mlp.graph import mlp_facts, mlp_graph
from llmcli.parts.part import Part


def mlp_workspace(mlp: MlpConfig, of: Reading) -> Workspace:
    """Two streams, attention's output, the norm, the result, and the hidden layer twice.

    Gated: gate and up, the activated gate, and the product of both.
    """
    columns = 2 * mlp.hidden if mlp.gated else mlp.hidden
    held = of.width * (3 * of.wide + of.size + of.both) + 2 * columns * of.size
    products = max(of.product(of.width, columns), of.product(mlp.hidden, of.width))
    return Workspace(peak=of.rows * held + of.widened(columns) + products)


PART = Part(
    config=MlpConfig, prefix="mlp", noun="the feed-forward", mixes=False,
    graph=mlp_graph, workspace=mlp_workspace, facts=mlp_facts,
    forward="llmcli.parts.mlp.forward:build_mlp",
)  # fmt: skip
