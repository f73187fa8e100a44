"""Token and position embeddings, and the output head."""

from __future__ import annotations

import re
from dataclasses import replace

from llmcli.graph.node import Absent, Node, Parameter, PartGraph
from llmcli.graph.ops import Add, LookUp, Op, Project, SoftCap
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.norm.graph import norm_graph


def embedding_graph(embedding: EmbeddingConfig) -> PartGraph:
    """`embed` and, with learned positions, `pos_embed`, both `[B, T, D]`: table rows.

    With a norm `embed_norm.out` is the token's part of the stream in place of `embed`.

    If all sequences are at the same positions, `pos_embed` is looked up once, `[T, D]`, and
    broadcast.
    """
    token = Node(
        name="embed", letter="E", axes=("T", "D"),
        op=LookUp(
            table="embed.W", by_position=False, scale=embedding.scale,
            rounded=embedding.rounded_scale,
        ),
        words="the tokens' rows of the embedding table" + ", scaled" * (embedding.scale != 1),
        group="embed", wide=True,
        theirs=("hook_embed", "embed.hook_out"),
    )  # fmt: skip
    table = Parameter(
        name="embed.W", axes=("V", "D"), makes="embed", kind="embedding", letter="W_E",
        words="embedding table, a row for each token of the vocabulary", theirs=("embed.W_E",),
    )  # fmt: skip
    similar = (r"(embed|embed_tokens|tok_embeddings|token_embd|wte)(\.weight)?",
               ("embed", "embed.W"))  # fmt: skip
    without: tuple[Absent, ...] = ()
    if embedding.per_layer is None:
        without = (Absent(names=r"ple\b", why="it has no embeddings for each layer"),)
    normed = PartGraph(nodes=())
    if embedding.norm is not None:
        words = ("the embeddings' norm", "the embeddings, normalized", "")
        normed = norm_graph(
            embedding.norm, "embed_norm", "embed", "E_norm", words, layer=None, wide=True,
        )  # fmt: skip
    nodes = (token, *(replace(node, ends=False, group="embed") for node in normed.nodes))
    tables = (table, *normed.parameters)
    if embedding.positions is None:
        theirs = {"hook_pos_embed": "pos_embed", "pos_embed.hook_out": "pos_embed",
                  "pos_embed.W_pos": "pos_embed.W"}  # fmt: skip
        absent = Absent(
            names=r"(hook_)?pos_embed\b", why="it has no learned positions", theirs=theirs
        )
        return PartGraph(
            nodes=nodes, parameters=tables, absent=(absent, *without), similar=(similar,)
        )
    position = Node(
        name="pos_embed", letter="P", axes=("T", "D"),
        op=LookUp(table="pos_embed.W", by_position=True),
        words="the positions' rows of the table of positions", group="embed", wide=True,
        shares="pos_embed.rows", theirs=("hook_pos_embed", "pos_embed.hook_out"),
    )  # fmt: skip
    rows = Parameter(
        name="pos_embed.W", axes=("P", "D"), makes="pos_embed", kind="embedding", letter="W_P",
        words="table of learned positions, a row for each", theirs=("pos_embed.W_pos",),
    )  # fmt: skip
    return PartGraph(
        nodes=(*nodes, position), parameters=(*tables, rows), sizes={"P": embedding.positions},
        absent=without,
        similar=(
            similar, (r"(embed_positions|wpe)(\.weight)?", ("pos_embed", "pos_embed.W")),
        ),
    )  # fmt: skip


def head_graph(head: HeadConfig, source: str) -> PartGraph:
    """`logits_raw` and `logits`, both `[B, T, V]`, and the head's matrix unless tied.

    They are the same tensor unless the head scales or caps logits.
    """
    product = Project(
        source=source, weight="head.W", bias="head.b" if head.bias else None, over="D", columns="V",
        remark=", W_head = W_Eᵀ (tied)" if head.tied else "",
    )  # fmt: skip
    finish: Op | None = None
    remark = "logits_raw in at least float32, for the softmax"
    if head.cap is not None:
        finish, remark = SoftCap(source="logits_raw", cap=head.cap), "logits_raw, capped"
    elif head.scale != 1:
        finish = Add(parts=("logits_raw",), before=(), scale=head.scale)
        remark = f"logits_raw times {head.scale:g}"
    raw = Node(
        name="logits_raw", letter="logits_raw", axes=("T", "V"), op=product, group="head",
        words="a score for every token of the vocabulary, in the model's arithmetic", wide=True,
        theirs=("hook_unembed", "unembed.hook_out", "lm_head"),
        formula_letter="logits" if finish is None else "", ends=True,
    )  # fmt: skip
    logits = Node(
        name="logits", letter="logits", axes=("T", "V"), op=finish or product, group="head",
        words=remark, wide=True, shares="logits_raw" if finish is None else None, ends=True,
    )  # fmt: skip
    parameters = (
        Parameter(
            name="head.W", axes=("D", "V"), makes="logits_raw", kind="head", letter="W_head",
            words="output head, a column for each token of the vocabulary", turned=True,
            theirs=("unembed.W_U", "lm_head.weight", "output.weight"),
        ),
        Parameter(
            name="head.b", axes=("V",), makes="logits_raw", kind="head", letter="b",
            words="bias of the output head", theirs=("unembed.b_U",),
        ),
    )  # fmt: skip
    missing = {}
    if head.tied:  # not stored, but the names are known
        missing["head.W"] = "its output head is tied, the transpose of `embed.W`"
    if not head.bias:
        missing["head.b"] = "it has no such bias"
    return PartGraph(
        nodes=(raw, logits),
        parameters=tuple(row for row in parameters if row.name not in missing),
        absent=tuple(
            Absent(names=re.escape(row.name), why=missing[row.name],
                   theirs=dict.fromkeys(row.theirs, row.name))
            for row in parameters if row.name in missing
        ),
        similar=(
            (r"(lm_head|unembed|output)(\.weight)?", ("logits", "head.W", "embed.W")),
            (r"head\.W", ("embed.W",)),  # tied head
        ),
    )  # fmt: skip
