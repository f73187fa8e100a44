"""The two ends of a model: token and position embeddings, and the output head."""

from __future__ import annotations

from llmcli.anatomy.spec import Call, TensorSpec, parameter
from llmcli.config import EmbeddingConfig, HeadConfig


def embedding_parameters(
    embedding: EmbeddingConfig, vocab: int, width: int
) -> tuple[TensorSpec, ...]:
    """`embed.W` `[V, D]`, with learned positions also `pos_embed.W` `[P, D]`: rows looked up."""
    token = parameter("embed.W", ("V", "D"), (vocab, width), "E = W_E[id]", layer=None)
    if embedding.positions is None:
        return (token,)
    rows = embedding.positions
    return (
        token,
        parameter("pos_embed.W", ("P", "D"), (rows, width), "P = W_P[position]", layer=None),
    )


def embedding_activations(
    embedding: EmbeddingConfig, width: int, call: Call
) -> tuple[TensorSpec, ...]:
    """`embed` and, with learned positions, `pos_embed`, both `[B, T, D]`.

    Where all sequences are at the same positions the rows of `pos_embed` are looked up once,
    `[T, D]`, and seen by each of them.
    """
    sizes = {"T": call.tokens, "D": width}
    token = call.activation("embed", sizes, "E = W_E[id]", wide=True)
    if embedding.positions is None:
        return (token,)
    rows = call.activation(
        "pos_embed", sizes, "P = W_P[position]", wide=True, shares="pos_embed.rows"
    )
    return (token, rows)


def head_parameters(head: HeadConfig, vocab: int, width: int) -> tuple[TensorSpec, ...]:
    """`head.W` `[D, V]`, stored `[V, D]` (absent where it is tied to `embed.W`); `head.b` `[V]`."""
    formula = head_formula(head)
    specs: tuple[TensorSpec, ...] = ()
    if not head.tied:
        weight = TensorSpec(
            name="head.W",
            kind="parameter",
            axes=("D", "V"),
            shape=(width, vocab),
            stored_shape=(vocab, width),
            formula=formula,
        )
        specs = (weight,)
    if head.bias:
        specs = (*specs, parameter("head.b", ("V",), (vocab,), formula, layer=None))
    return specs


def head_activations(
    head: HeadConfig, vocab: int, width: int, call: Call, *, tokens: int
) -> tuple[TensorSpec, ...]:
    """`logits_raw` and `logits`, both `[B, T, V]`; `tokens` is 1 where only the last is wanted.

    They differ where a head scales or caps them, and are one tensor where it does not.
    """
    sizes = {"T": tokens, "V": vocab}
    flops = call.product_flops(width, vocab, tokens=tokens)
    return (
        call.activation("logits_raw", sizes, head_formula(head), flops=flops, wide=True),
        call.activation("logits", sizes, "logits = logits_raw", wide=True, shares="logits_raw"),
    )


def head_formula(head: HeadConfig) -> str:
    """`logits = H′ W_head`, the transpose of the token embedding where it is tied."""
    bias = " + b" if head.bias else ""
    return f"logits = H′ W_head{bias}" + (", W_head = W_Eᵀ (tied)" if head.tied else "")
