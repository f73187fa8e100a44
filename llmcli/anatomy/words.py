"""What each tensor is, in a few words, for tables of names."""

from __future__ import annotations

import re

_MODEL = {
    "embed": "the tokens' rows of the embedding table",
    "pos_embed": "the positions' rows of the table of positions",
    "embed.W": "embedding table, a row for each token of the vocabulary",
    "pos_embed.W": "table of learned positions, a row for each",
    "ln_final.scale": "what the final norm divides each row by",
    "ln_final.out": "the last residual stream, normalized, as it enters the head",
    "ln_final.w": "weights of the final norm",
    "ln_final.b": "bias of the final norm",
    "head.W": "output head, a column for each token of the vocabulary",
    "head.b": "bias of the output head",
    "logits_raw": "a score for every token of the vocabulary, in the model's arithmetic",
    "logits": "the same in at least float32, as the softmax takes it",
}
_LAYER = {
    "resid_pre": "the residual stream as it enters the block",
    "ln1.scale": "what the norm before attention divides each row by",
    "ln1.out": "the residual stream, normalized, as it enters attention",
    "ln1.w": "weights of the norm before attention",
    "ln1.b": "bias of the norm before attention",
    "attn.W_q": "projection to the queries of all heads",
    "attn.W_k": "projection to the keys of all kv heads",
    "attn.W_v": "projection to the values of all kv heads",
    "attn.W_o": "projection of all heads' results back to the width",
    "attn.b_q": "bias of the queries",
    "attn.b_k": "bias of the keys",
    "attn.b_v": "bias of the values",
    "attn.b_o": "bias of the attention's output",
    "attn.q_norm.w": "weights of the norm of every query",
    "attn.k_norm.w": "weights of the norm of every key",
    "attn.q_norm.b": "bias of the norm of every query",
    "attn.k_norm.b": "bias of the norm of every key",
    "attn.q": "a query for each token and head",
    "attn.k": "a key for each token and kv head",
    "attn.v": "a value for each token and kv head",
    "attn.q_norm": "the queries, normalized",
    "attn.k_norm": "the keys, normalized",
    "attn.q_rot": "the queries, rotated by their positions",
    "attn.k_rot": "the keys, rotated by their positions",
    "attn.scores": "query times key, scaled, −∞ where the mask hides the key",
    "attn.pattern": "attention weights: the softmax of the scores, rows that sum to 1",
    "attn.z": "for each head the values, mixed by its attention weights",
    "attn.result": "what each head by itself adds to the residual stream",
    "attn_out": "what attention adds to the residual stream",
    "resid_mid": "the residual stream after attention",
    "ln2.scale": "what the norm before the feed-forward divides each row by",
    "ln2.out": "the residual stream, normalized, as it enters the feed-forward",
    "ln2.w": "weights of the norm before the feed-forward",
    "ln2.b": "bias of the norm before the feed-forward",
    "mlp.W_gate": "projection to the gates of the hidden layer",
    "mlp.W_up": "projection to the neurons of the hidden layer",
    "mlp.W_down": "projection of the hidden layer back to the width",
    "mlp.b_gate": "bias of the gates",
    "mlp.b_up": "bias of the neurons",
    "mlp.b_down": "bias of the feed-forward's output",
    "mlp.pre": "the neurons before their activation function",
    "mlp.gate": "the gates before their activation function",
    "mlp.up": "the neurons that the gates multiply",
    "mlp.act": "the gates after their activation function",
    "mlp.post": "the hidden layer as it enters the last projection",
    "mlp_out": "what the feed-forward adds to the residual stream",
    "resid_post": "the residual stream as it leaves the block",
}
_STATE = {"k": "the keys that are kept", "v": "the values that are kept"}


def words(name: str) -> str:
    """What `blocks.3.attn.q` is, and every other name; raises KeyError for one without words."""
    found = re.fullmatch(r"(blocks|cache)\.\d+\.(.+)", name)
    if found is None:
        return _MODEL[name]
    return (_LAYER if found[1] == "blocks" else _STATE)[found[2]]
