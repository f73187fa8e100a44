"""Registers the part, with its memory during prefill."""

from __future__ import annotations

from llmcli.graph.workspace import Reading, Workspace
from llmcli.parts.embedding.config import LayerEmbeddingConfig
from llmcli.parts.part import Part
from llmcli.parts.ple.config import PleConfig
from llmcli.parts.ple.graph import ple_facts, ple_graph


def _workspace(p: PleConfig, of: Reading) -> Workspace:
    """The stream, the product's input, the result, and gates before and after activation."""
    held = of.width * (2 * of.wide + of.size + of.both) + p.size * (2 * of.size + of.wide)
    products = max(of.product(of.width, p.size), of.product(p.size, of.width))
    return Workspace(peak=of.rows * held + of.widened(p.size) + products)


def layer_embedding_workspace(config: LayerEmbeddingConfig, of: Reading) -> Workspace:
    """Table rows, the product and its norm; the layers' input stays, plus fragmented room."""
    columns = config.layers * config.size
    one = of.rows * columns * of.wide
    held = of.rows * of.width * (of.wide + of.size)
    peak = 3 * one + held + of.product(of.width, columns) + of.widened(columns)
    return Workspace(peak=max(0, peak - 2 * one), shared={"ple": 2 * one})


PART = Part(
    config=PleConfig, prefix="ple", noun="the embedding for this layer", mixes=False,
    graph=ple_graph, workspace=_workspace, facts=ple_facts,
    forward="llmcli.parts.ple.forward:Ple",
)  # fmt: skip
