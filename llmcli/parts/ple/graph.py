"""Per-layer embeddings, and the part of a block that uses them.

Letters: T tokens, D width, Lp layers, Dp size of a layer's embedding, Vp rows of their table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.graph.node import Node, Parameter, PartGraph, Site
from llmcli.graph.ops import Activate, Add, Gate, LookUp, Normalize, Op, Project
from llmcli.parts.embedding.config import EmbeddingConfig
from llmcli.parts.norm.graph import norm_parameters
from llmcli.parts.ple.config import PleConfig

BOTH = 2**-0.5  # factor on the sum of table row and projection


def layer_embedding_graph(embedding: EmbeddingConfig) -> PartGraph:
    """`ple.proj proj_norm embed in`, all `[B, Lp, T, Dp]`: the input of all blocks."""
    config = embedding.per_layer
    assert config is not None

    def node(leaf: str, letter: str, op: Op, words: str, *, wide: bool = True) -> Node:
        return Node(
            name=f"ple.{leaf}", letter=letter, axes=("Lp", "T", "Dp"), op=op, words=words,
            group="embed", wide=wide,
        )  # fmt: skip

    norm = config.norm
    nodes = (
        node("proj", "P_L", Project(
            source="embed", weight="ple.W_proj", over="D", columns="Lp·Dp", heads=config.layers,
            head="layer",
        ), "the embeddings, projected per layer"),
        node("proj_norm", "P′_L", Normalize(
            source="ple.proj", norm=norm, weight="ple.proj_norm.w",
        ), "the projected embeddings, normalized"),
        node("embed", "E_L", LookUp(
            table="ple.embed.W", by_position=False, scale=config.scale,
            rounded=embedding.rounded_scale, heads=config.layers,
        ), "the tokens' rows of the table of embeddings for each layer, scaled"),
        node("in", "I", Add(parts=("ple.proj_norm", "ple.embed"), before=(), scale=BOTH),
             "the additional input of each layer"),
    )  # fmt: skip
    table = Parameter(
        name="ple.embed.W", axes=("Vp", "Lp·Dp"), makes="ple.embed", kind="embedding", letter="W_I",
        words="table of embeddings for each layer, a row for each token",
    )  # fmt: skip
    project = Parameter(
        name="ple.W_proj", axes=("D", "Lp·Dp"), makes="ple.proj", kind="embedding", letter="W_proj",
        words="projection of the embeddings for each layer", turned=True,
    )  # fmt: skip
    return PartGraph(
        nodes=nodes,
        parameters=(project, *norm_parameters(
            norm, "ple.proj_norm", "ple.proj_norm", "Dp", None, "the norm of that projection",
        ), table),
        sizes={"Lp": config.layers, "Dp": config.size, "Vp": config.vocab},
        similar=((r"embed_tokens_per_layer(\.weight)?", ("ple.embed", "ple.embed.W")),),
    )  # fmt: skip


def ple_graph(p: PleConfig, site: Site) -> PartGraph:
    """`gate act post` `[B, T, Dp]`, and the output."""

    def node(leaf: str, letter: str, op: Op, words: str) -> Node:
        return Node(
            name=f"{site.name}.{leaf}", letter=letter, axes=("T", "Dp"), op=op, words=words,
            group="ple", layer=site.layer,
        )  # fmt: skip

    gate, act, post = (f"{site.name}.{leaf}" for leaf in ("gate", "act", "post"))
    enter = Project(source=site.source, weight=f"{site.name}.W_gate", over="D", columns="Dp")
    leave = Project(source=post, weight=f"{site.name}.W_out", over="Dp", columns="D")
    words, theirs = site.output("the embedding for this layer", "hook_ple_out")
    return PartGraph(
        nodes=(
            node("gate", "G_p", enter, "the gates of the embedding for this layer"),
            node("act", "Activation(G_p)", Activate(source=gate, function=p.activation),
                 "the gates after their activation function"),
            node("post", "L_p", Gate(act=act, up="ple.in", item=site.layer),
                 "the embedding for this layer, gated"),
            Node(
                name=site.makes, letter=site.letter, axes=("T", "D"), op=leave, words=words,
                group="ple", layer=site.layer, wide=True, theirs=theirs[1:],
            ),
        ),
        parameters=tuple(
            Parameter(
                name=f"{site.name}.{leaf}", axes=axes, makes=makes, words=said, kind="mlp",
                letter=leaf, layer=site.layer, turned=True,
            )
            for leaf, axes, makes, said in (
                ("W_gate", ("D", "Dp"), gate, "projection to the gates of a layer's embedding"),
                ("W_out", ("Dp", "D"), site.makes, "projection back to the width"),
            )
        ),
        sizes={"Dp": p.size},
    )  # fmt: skip


def ple_facts(p: PleConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    return {"details": (f"embeddings of {p.size} for each layer",)}
