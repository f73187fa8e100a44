"""Token and position embeddings, and the output head."""

from __future__ import annotations

import re

from llmcli.graph.node import PartGraph
from llmcli.graph.ops import Add, LookUp, Op, Project, SoftCap
from llmcli.graph.rows import Rows
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig

_ROWS = """
    embed        E  T D  embed wide  the tokens' rows of the embedding table
    pos_embed    P  T D  embed wide  the positions' rows of the table of positions
    embed.W      embedding table, a row for each token of the vocabulary
    pos_embed.W  table of learned positions, a row for each
"""
_NAMES = """
    embed        hook_embed embed.hook_out
    pos_embed    hook_pos_embed pos_embed.hook_out
    embed.W      embed.W_E
    pos_embed.W  pos_embed.W_pos
"""
_HEAD_ROWS = """
    logits_raw  logits_raw  T V  head wide  a score for every token of the vocabulary
    logits      logits      T V  head wide  logits_raw in at least float32, for the softmax
    head.W      output head, a column for each token of the vocabulary
    head.b      bias of the output head
"""
_HEAD_NAMES = """
    logits_raw  hook_unembed unembed.hook_out lm_head
    head.W      unembed.W_U lm_head.weight output.weight
    head.b      unembed.b_U
"""


def embedding_graph(embedding: EmbeddingConfig) -> PartGraph:
    """`embed` and, with learned positions, `pos_embed`, both `[B, T, D]`: table rows.

    If all sequences are at the same positions, `pos_embed` is looked up once, `[T, D]`, and
    broadcast.
    """
    r = Rows("", _ROWS, layer=None, kind="embedding", theirs=_NAMES)
    look_up = LookUp(
        table=r.parameter("embed.W", "V D", "embed", letter="W_E"), by_position=False,
        scale=embedding.scale, rounded=embedding.rounded_scale,
    )  # fmt: skip
    scaled = ", scaled" * (embedding.scale != 1)
    r.node("embed", look_up, words=f"the tokens' rows of the embedding table{scaled}")
    similar = [(r"(embed|embed_tokens|tok_embeddings|token_embd|wte)(\.weight)?",
                ("embed", "embed.W"))]  # fmt: skip
    if embedding.positions is None:
        theirs = dict.fromkeys(("hook_pos_embed", "pos_embed.hook_out"), "pos_embed")
        theirs["pos_embed.W_pos"] = "pos_embed.W"
        r.absent(r"(hook_)?pos_embed\b", "it has no learned positions", theirs)
    else:
        r.sizes["P"] = embedding.positions
        rows = r.parameter("pos_embed.W", "P D", "pos_embed", letter="W_P")
        r.node("pos_embed", LookUp(table=rows, by_position=True), shares="pos_embed.rows")
        similar.append((r"(embed_positions|wpe)(\.weight)?", ("pos_embed", "pos_embed.W")))
    if embedding.per_layer is None:
        r.absent(r"ple\b", "it has no embeddings for each layer")
    return r.graph(similar=tuple(similar))


def head_graph(head: HeadConfig, source: str) -> PartGraph:
    """`logits_raw` and `logits`, both `[B, T, V]`, and the head's matrix unless tied.

    They are the same tensor unless the head scales or caps logits.
    """
    r = Rows("", _HEAD_ROWS, layer=None, kind="head", theirs=_HEAD_NAMES)
    missing = {}
    if head.tied:  # not stored, but the names are known
        missing["head.W"] = "its output head is tied, the transpose of `embed.W`"
    if not head.bias:
        missing["head.b"] = "it has no such bias"
    for name, axes, letter in (("head.W", "D V", "W_head"), ("head.b", "V", "b")):
        if name in missing:
            r.absent(re.escape(name), missing[name], dict.fromkeys(r.names(name), name))
        else:
            r.parameter(name, axes, "logits_raw", letter=letter, turned=name == "head.W")
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
    same = finish is None
    raw = r.node(
        "logits_raw", product, formula_letter="logits" if same else "", ends=True,
        words="a score for every token of the vocabulary, in the model's arithmetic",
    )  # fmt: skip
    r.node("logits", finish or product, words=remark, shares=raw if same else None, ends=True)
    return r.graph(
        similar=(
            (r"(lm_head|unembed|output)(\.weight)?", ("logits", "head.W", "embed.W")),
            (r"head\.W", ("embed.W",)),  # tied head
        ),
    )
