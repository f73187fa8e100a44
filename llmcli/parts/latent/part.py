"""Registers latent attention as a part, with its memory."""

from __future__ import annotations

from collections.abc import Hashable

from llmcli.graph.workspace import Reading, Workspace
from llmcli.parts.latent.config import LatentConfig
from llmcli.parts.latent.graph import latent_facts, latent_graph
from llmcli.parts.part import Part


def _workspace(a: LatentConfig, of: Reading) -> Workspace:
    """The stream, its norm, latents and queries; then keys and values of all positions.

    The latter dominate: the product, keys joined with their rotated part, on a CPU zero-padded
    values (`ops.attention`), and as much fragmented memory of an earlier chunk.
    """
    rows, size, wide = of.rows, of.size, of.wide
    queries, keys = a.heads * a.head_dim, of.batch * of.keys
    values = a.heads * (a.value_dim if of.cuda else max(a.value_dim, a.head_dim))
    held = rows * (of.width * (wide + size) + a.kept * (wide + size) + queries * size)
    if a.absorbs(of.tokens, of.keys):
        mixing = keys * a.kept * (wide if of.kept < wide else 0)
        mixing += rows * a.heads * (2 * a.kept + 2 * of.keys) * wide
    else:
        product = a.heads * (a.content + a.value_dim)
        mixing = keys * (product + queries + (0 if of.cuda else values)) * size
        mixing += of.product(a.rank, product) + keys * a.rank * (size if of.kept < size else 0)
        mixing += max(0, keys - rows) * product * size
        if of.keys > of.tokens:
            mixing += of.tokens * of.keys * size  # the mask as 0 and -∞
    asking = rows * (queries * size + a.heads * a.rope.dims * (size + wide))
    if a.query_rank is not None:
        asking += rows * a.query_rank * (wide + size)
    projecting = rows * (values * size + of.width * of.both) + of.product(values, of.width)
    most = max(mixing + rows * values * size, asking, projecting)
    positions = 1 << max(of.keys - 1, 255).bit_length()
    shared: dict[Hashable, int] = {("rope", a.rope): 2 * positions * a.rope.dims * wide}
    if of.keys > of.tokens:
        shared["mask", None] = of.tokens * of.keys
    return Workspace(peak=held + most + of.widened(queries), shared=shared)


PART = Part(
    config=LatentConfig, prefix="attn", noun="attention", mixes=True, graph=latent_graph,
    workspace=_workspace, facts=latent_facts,
    forward="llmcli.parts.latent.forward:LatentAttention",
)  # fmt: skip
