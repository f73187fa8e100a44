"""Token and position embeddings, and the output head."""

from __future__ import annotations

from dataclasses import replace

from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.graph.node import PartGraph
from llmcli.graph.ops import Add, LookUp, Op, Project, SoftCap
from llmcli.graph.parts.norm import norm_graph
from llmcli.graph.rows import Rows

_ROWS = """
    embed         E   T D   embed wide  the tokens' rows of the embedding table
    narrow        E   T De  embed wide
    embed_proj    E′  T D   embed wide  the embeddings, projected to the stream's width
    pos_embed     P   T D   embed wide  the positions' rows of the table of positions
    embed.W       embedding table, a row for each token of the vocabulary
    embed_proj.W  projection of the embeddings to the stream's width
    pos_embed.W   table of learned positions, a row for each
"""
_HEAD_ROWS = """
    head_proj    H″          T De  head       the final norm's output, of the embeddings' width
    logits_raw   logits_raw  T V   head wide  a score for every token of the vocabulary
    logits       logits      T V   head wide  logits_raw in at least float32, for the softmax
    head_proj.W  projection of the final norm's output to the embeddings' width
    head.W       output head, a column for each token of the vocabulary
    head.b       bias of the output head
"""


def embedding_graph(embedding: EmbeddingConfig) -> PartGraph:
    """`embed` and, with learned positions, `pos_embed`, both `[B, T, D]`: table rows.

    With a norm `embed_norm.out` is the token's part of the stream in place of `embed`, and with
    embeddings narrower or wider than the stream it is `embed_proj`.

    If all sequences are at the same positions, `pos_embed` is looked up once, `[T, D]`, and
    broadcast.
    """
    r = Rows("", _ROWS, "embedding", layer=None)
    size, rounded = embedding.size, embedding.rounded_scale
    table = r.parameter("embed.W", "V D" if size is None else "V De", "embed", letter="W_E")
    look_up = LookUp(table=table, by_position=False, scale=embedding.scale, rounded=rounded)
    scaled = ", scaled" * (embedding.scale != 1)
    looked_up = f"the tokens' rows of the embedding table{scaled}"
    r.node("embed" if size is None else "narrow", look_up, name="embed", words=looked_up)
    if size is not None:
        r.sizes["De"] = size
        r.parameter("embed_proj.W", "De D", "embed_proj", letter="W_ED", transposed=True)
        product = Project(source="embed", weight="embed_proj.W", over="De", columns="D")
        r.node("embed_proj", product)
    if embedding.norm is not None:
        words = ("the embeddings' norm", "the embeddings, normalized")
        norm = norm_graph(
            embedding.norm, "embed_norm", "E_norm", r.nodes[-1].name, words, layer=None, wide=True
        )
        r.nodes += (replace(node, ends=False, group="embed") for node in norm.nodes)
        r.parameters += norm.parameters
    if embedding.positions is not None:
        r.sizes["P"] = embedding.positions
        rows = r.parameter("pos_embed.W", "P D", "pos_embed", letter="W_P")
        r.node("pos_embed", LookUp(table=rows, by_position=True), shares="pos_embed.rows")
    return r.graph()


def head_graph(head: HeadConfig, source: str, size: int | None) -> PartGraph:
    """`logits_raw` and `logits`, both `[B, T, V]`, and the head's matrix unless tied.

    They are the same tensor unless the head scales or caps logits. `size`: columns of the
    embeddings, if they are not D: the head's input is `head_proj` `[B, T, De]`.
    """
    r, over = Rows("", _HEAD_ROWS, "head", layer=None), "D"
    if size is not None:
        r.sizes["De"], over = size, "De"
        r.parameter("head_proj.W", "D De", "head_proj", letter="W_DE", transposed=True)
        projected = Project(source=source, weight="head_proj.W", over="D", columns="De")
        source = r.node("head_proj", projected, ends=True)
    if not head.tied:
        r.parameter("head.W", f"{over} V", "logits_raw", letter="W_head", transposed=True)
    if head.bias:
        r.parameter("head.b", "V", "logits_raw", letter="b")
    bias, tied = "head.b" if head.bias else None, ", W_head = W_Eᵀ (tied)" if head.tied else ""
    product = Project(
        source=source, weight="head.W", bias=bias, over=over, columns="V", remark=tied
    )
    finish: Op | None = None
    remark = "logits_raw in at least float32, for the softmax"
    if head.cap is not None:
        finish, remark = SoftCap(source="logits_raw", cap=head.cap), "logits_raw, capped"
    elif head.scale != 1:
        finish = Add(parts=("logits_raw",), before=(), scale=head.scale)
        remark = f"logits_raw times {head.scale:g}"
    same = finish is None
    letter = "logits" if same else ""
    words = "a score for every token of the vocabulary, in the model's arithmetic"
    raw = r.node("logits_raw", product, words=words, formula_letter=letter, ends=True)
    r.node("logits", finish or product, words=remark, shares=raw if same else None, ends=True)
    return r.graph()
