"""Latent attention as a kind of part, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Hashable

from llmcli.graph.workspace import Reading, Workspace
from llmcli.parts.latent.config import LatentConfig
from llmcli.parts.latent.graph import latent_facts, latent_graph
from llmcli.parts.part import Part


def _workspace(a: LatentConfig, of: Reading) -> Workspace:
    """The stream, its norm, latents and queries; then keys and values of all positions."""
    rows, size, wide = of.rows, of.size, of.wide
    queries, values = a.heads * a.head_dim, a.heads * a.value_dim
    held = rows * (of.width * (wide + size) + a.kept * (wide + size) + queries * 3 * size)
    if a.query_rank is not None:
        held += rows * a.query_rank * (wide + size)
    keys = of.batch * of.keys
    if a.absorbs(of.tokens, of.keys):
        weights = a.heads * (a.content + a.value_dim) * a.rank * (0 if size >= 4 else wide)
        mixing = keys * a.kept * 2 * wide + rows * a.heads * (2 * a.kept + of.keys * 3) * wide
        mixing += weights
    else:
        mixing = keys * (a.heads * (a.content + a.value_dim) + queries) * size
        mixing += keys * a.kept * (size if of.kept < size else 0)
        mixing += of.tokens * of.keys * (size if of.keys > of.tokens else 0)
    projecting = rows * (values * size + of.width * of.both)
    products = of.product(of.width, max(queries, a.kept))
    shared: dict[Hashable, int] = {}
    positions = 1 << max(of.keys - 1, 255).bit_length()
    shared["rope", a.rope] = 2 * positions * a.rope.dims * wide
    if of.keys > of.tokens:
        shared["mask", None] = of.tokens * of.keys
    peak = held + max(mixing + rows * values * size, projecting, products) + of.widened(queries)
    return Workspace(peak=peak, shared=shared)


PART = Part(
    config=LatentConfig, prefix="attn", noun="attention", mixes=True, graph=latent_graph,
    workspace=_workspace, facts=latent_facts,
    forward="llmcli.parts.latent.forward:LatentAttention",
)  # fmt: skip
