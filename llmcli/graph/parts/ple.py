"""Per-layer embeddings, and the part of a block that uses them.

Letters: T tokens, D width, Lp layers, Dp size of a layer's embedding, Vp rows of their table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.config.embedding import EmbeddingConfig
from llmcli.config.ple import PleConfig
from llmcli.graph.node import PartGraph, Site
from llmcli.graph.ops import Activate, Add, Gate, LookUp
from llmcli.graph.rows import Rows, sizes_of

BOTH = 2**-0.5  # factor on the sum of table row and projection
_INPUT_ROWS = """
    proj       P_L   Lp T Dp  embed wide  the embeddings, projected per layer
    proj_norm  P′_L  Lp T Dp  embed wide  the projected embeddings, normalized
    embed      E_L   Lp T Dp  embed wide
    in         I     Lp T Dp  embed wide  the additional input of each layer
    W_proj     projection of the embeddings for each layer
    embed.W    table of embeddings for each layer, a row for each token
"""
_ROWS = """
    gate    G_p              T Dp  ple  the gates of the embedding for this layer
    act     Activation(G_p)  T Dp  ple  the gates after their activation function
    post    L_p              T Dp  ple  the embedding for this layer, gated
    out     T                T D   ple
    W_gate  projection to the gates of a layer's embedding
    W_out   projection back to the width
"""


def layer_embedding_graph(embedding: EmbeddingConfig) -> PartGraph:
    """`ple.proj proj_norm embed in`, all `[B, Lp, T, Dp]`: the input of all blocks."""
    config = embedding.per_layer
    assert config is not None
    sizes = {"Lp": config.layers, "Dp": config.size, "Vp": config.vocab}
    r = Rows("ple", _INPUT_ROWS, "embedding", sizes, layer=None)
    proj = r.project("proj", "embed", head="layer")
    proj = r.normalize("proj_norm", proj, config.norm, "the norm of that projection")
    table = r.parameter("embed.W", "Vp Lp·Dp", "embed", letter="W_I")
    scale, rounded = config.scale, embedding.rounded_scale
    look_up = LookUp(
        table=table, by_position=False, scale=scale, rounded=rounded, heads=config.layers
    )
    words = "the tokens' rows of the table of embeddings for each layer, scaled"
    rows = r.node("embed", look_up, words=words)
    r.node("in", Add(parts=(proj, rows), before=(), scale=BOTH))
    return r.graph()


def ple_graph(p: PleConfig, site: Site) -> PartGraph:
    """`gate act post` `[B, T, Dp]`, and the output."""
    r = Rows(site.name, _ROWS, "mlp", sizes_of(p), layer=site.layer)
    gate = r.project("gate", site.source)
    act = r.node("act", Activate(source=gate, function=p.activation))
    post = r.node("post", Gate(act=act, up="ple.in", item=site.layer))
    r.output(site, "the embedding for this layer", "out", post, over="Dp")
    return r.graph()


def ple_facts(p: PleConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    return {"details": (f"embeddings of {p.size} for each layer",)}
