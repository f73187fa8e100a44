"""The texts of the rungs for one model, and the sizes behind the letters of its formulas."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from llmcli.config.attention import AttentionConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class RungText:
    """What the screen says of a rung.

    Its `title`, the formula of the rung `before`, its own (`here`), and the `idea`: why it gives
    the same numbers and what it saves. In `TEXTS`, `[rotates:…]` is for models that rotate keys,
    `[shared:…]` where heads share keys, `[apart:…]` where they do not, `[gated:…]` with a gated
    feed-forward, and `[window:…]` with a window. See `text_of`.
    """

    title: str
    before: str
    here: str
    idea: str


KEPT = """
[window: A block with a window of W = {window} keeps all keys, reads the last W.]
[rotates: Keys are kept rotated: a key's position does not change. (Where a model changes the
rotation itself with the length, as dynamic NTK and LongRoPE do past the trained length, the kept
ones are those of a shorter sequence and the numbers differ a little.)]"""

TEXTS = {
    "loops": RungText(
        title="loops over vectors: every query token, every key token, every neuron",
        before="an LLM as concepts: every token asks all tokens before it",
        here="""\
1      for every token t_q:
1.1      q = t_q × W_q[rotates: and q = R(position) q]
1.2      for every token t_k up to t_q:
1.2.1      k = t_k × W_k[rotates: and k = R(position) k]
1.2.2      score = q · k
1.3      a = softmax(score / √(d/h)) over the scores of this t_q
1.4      for every token t_v up to t_q:
1.4.1      v = t_v × W_v
1.4.2      its part of the context: a · v
1.5      c = the sum of these parts
2      for every token, every neuron: Activation(t · weights + bias)""",
        idea="""
Each token's query and every token's key[rotates:, rotated by their positions,] are compared; the
scores, scaled and through a softmax, say how much of each token's value goes into its context. Done
literally, keys and values are computed again for every query and every head: n² vector-matrix
products where n would do. The loop over t_k is usually written over all n tokens, and the later
ones are masked; here it ends at the query's own token, which gives the same.""",
    ),
    "rows": RungText(
        title="one query at a time: its scores and its context are one product each",
        before="""\
for every t_k: k = t_k × W_k, score = q · k; for every t_v: c += a · v
for every neuron: Activation(t · weights + bias)""",
        here="""\
k_i = t_i W_k and v_i = t_i W_v once, stacked as the rows of K and V
for every t_q: c = softmax(q Kᵀ / √(d/h)) V
Layer = Activation(x W + b): all neurons of one token at once""",
        idea="""
A key depends on its own token only, so it is computed once instead of for every query; the scores
of one query are then the dot products of q with the rows of K, that is, with the columns of Kᵀ, and
the weighted sum of the values is a product as well. The same multiplications and sums, but a
product of a row with a matrix (GEMV) does d/h × n of them in one call, and the n² computations of
keys and values are n. A neuron's weights are a column of W, so that x W is the sums of all of them.
W is [in, out] here; checkpoints often store Wᵀ and write W @ x with x as a column.""",
    ),
    "matrices": RungText(
        title="vectors of vectors become matrices, one head at a time",
        before="""\
for every t_q: c = softmax(q Kᵀ / √(d/h)) V
for every token: Layer = Activation(x W + b)""",
        here="""\
Q = T W_q, K = T W_k, V = T W_v[rotates:; Q = R(position) Q, K = R(position) K]
Attention(Q, K, V) = softmax(Q Kᵀ / √(d/h) + M) V
Layer = Activation(X W + B) for all tokens at once, F neurons""",
        idea="""
Row i of a product X W is x_i W, so the n products of a row are one product of matrices (GEMM),
which reads W once instead of n times; row i of B is b, for every i. A product takes columns on its
right, and the keys are the rows of K: hence Kᵀ, a view that moves nothing. Now every query meets
every key, and the mask M (−∞ above the diagonal) hides the later tokens before the softmax; the
half of Q Kᵀ that it hides is computed in vain and still cheaper than a loop. The formula is often
written without the mask, and even without the transpose; it needs both. The activation follows the
hidden layer only.""",
    ),
    "heads": RungText(
        title="heads are a dimension: all of them in one batched product",
        before="for every head: Q = T W_q …; softmax(Q Kᵀ / √(d/h) + M) V",
        here="""\
Q = T (W_q¹ ⊕ … ⊕ W_qʰ), K and V alike[rotates:; Q = R(position) Q, K = R(position) K]
n × d → n × h × d/h → h × n × d/h: two views
softmax(Q Kᵀ / √(d/h) + M) V for all heads in one call""",
        idea="""
A product works column by column, so weights concatenated by columns give the heads' queries side by
side: one product instead of h. Seeing n × d as n × h × d/h and that as h × n × d/h moves no number,
only the strides change; a library loops over the leading dimension by itself. Merging the heads
back does move them: a row of n × d wants numbers of every head side by side, which h × n × d/h has
far apart, so that is a copy. One head's output is n × d/h, neither n × n/h nor n × d, as it is
sometimes given.
[shared: Several heads share a key and a value: a batched product wants a pair of matrices for every
head, so both are repeated h/h_kv times, a copy that rung 8 does without.]""",
    ),
    "combined": RungText(
        title="combined QKV: one product instead of three",
        before="Q = T W_q, K = T W_k, V = T W_v",
        here="""\
W_qkv = W_q ⊕ W_k ⊕ W_v, as the model is built
Q, K, V = split(T W_qkv)""",
        idea="""
The same columns side by side in one matrix give the same numbers side by side in one product, and
the three slices of it are views: Q, K and V. Nothing is saved in arithmetic: what two calls less
save is their fixed cost, and one wide product fills a machine better than three narrow ones.
[shared: Here heads share keys and values: K and V are narrower than Q.]""",
    ),
    "cache": RungText(
        title="KV cache: a new token computes its own row only",
        before="for a new token n rows again: softmax(Q Kᵀ / √(d/h) + M) V",
        here="""\
for a new token its own row only: Q_n, K_n, V_n = split(T_n W_qkv)
K and V: the kept rows and the new one[rotates: (rotated)]
Attention(Q_n, K, V) = softmax(Q_n Kᵀ / √(d/h)) V""",
        idea="""
The next token depends on the last row of the output only, and that row on Q's last row and on all
rows of K and V, which under a causal mask never change once computed: they are kept, and n rows of
work become one, every product a GEMV. Queries are not kept. The last row sees all keys and needs no
mask: true for one whole sequence, not for a prompt in chunks or a batch padded to one length. What
comes out is one row of v logits.""" + KEPT,
    ),
    "batch": RungText(
        title="a batch: several sequences at once, one rank higher",
        before="activations of one sequence: n × d, heads h × n × d/h; logits n × v",
        here="""\
activations of b sequences: b × n × d, heads b × h × n × d/h
logits b × n × v; the weights as before: they have no b""",
        idea="""
Sequences do not see each other, so b of them are one more leading dimension that the library loops
over, like the heads; the weights have none. Each number is computed as before. What is saved is
reading: a weight fetched from memory serves b rows, so the GEMVs of a new token become products of
b rows. Only the cache grows with b, b × [shared:h_kv][apart:h] × n × d/h for keys. Here the
sequences have equal lengths; shorter ones would be padded, and then the last row needs its mask
back.""" + KEPT,
    ),
    "fused": RungText(
        title="fused kernels: the decoder that llmcli runs",
        before="Q Kᵀ, scale, + M, softmax (5), A V: 9 kernels, 6 tensors of n × n",
        here="""\
attend(Q, K, V): one kernel, no n × n tensor[gated:
G and U in one product, too]""",
        idea="""
Fewer, larger kernels for the same formulas. Attention is one call that goes through K and V in
blocks and keeps a running maximum and sum for the softmax, so that the n × n scores never lie in
memory and, where the kernel is told that the mask is causal, need not be computed above the
diagonal. The weights of queries and keys and values[gated:, and of gate and up,] lie one after the
other as the model is loaded (no copy for this rung); bias and product are one kernel, and so are
the steps of a norm. The sums are taken in another order: the same numbers to rounding. The cache
has room for the whole sequence and is written in place.""",
    ),
}


def first_attention(config: ModelConfig) -> AttentionConfig:
    """The attention whose axes the letters are: that of the first block which has one."""
    return next(layer.attention for layer in config.layers if layer.attention is not None)


def first_mlp(config: ModelConfig) -> MlpConfig | None:
    """The first feed-forward of the model, None where it has none."""
    parts = (part for layer in config.layers for part in layer.parts)
    return next((part for part in parts if isinstance(part, MlpConfig)), None)


def text_of(name: str, config: ModelConfig) -> RungText:
    """The text of the rung of that name, as far as it applies to a model."""
    mixer, ffn = first_attention(config), first_mlp(config)
    shared = mixer.kv_heads < mixer.heads
    holds = {
        "rotates": mixer.rope is not None,
        "shared": shared,
        "apart": not shared,
        "gated": ffn is not None and ffn.gated,
        "window": mixer.scores.window is not None,
    }

    def for_model(text: str) -> str:
        text = re.sub(r"\[(\w+):([^]]*)\]", lambda part: part[2] if holds[part[1]] else "", text)
        text = re.sub(r"(\w+(?: Kᵀ)?) / √\(d/h\)", lambda score: _scaled(score[1], mixer), text)
        return text.replace("{window}", str(mixer.scores.window)).replace("d/h", head_size(config))

    text = TEXTS[name]
    return RungText(
        title=text.title,
        before=for_model(text.before),
        here=for_model(text.here),
        idea=" ".join(for_model(text.idea).split()),
    )


def _scaled(score: str, mixer: AttentionConfig) -> str:
    """`score / √(d/h)`, or times the model's own scale; soft-capped where the model does that."""
    usual = math.isclose(mixer.scores.scale, mixer.head_dim**-0.5)
    scaled = f"{score} / √(d/h)" if usual else f"{score} · scale"
    return scaled if mixer.scores.cap is None else f"cap · tanh({scaled} / cap)"


def head_size(config: ModelConfig) -> str:
    """The letter of a head's size: `d/h` if the heads divide the width among them, else `d_k`."""
    mixers = (layer.attention for layer in config.layers)
    divided = all(mixer.divides(config.width) for mixer in mixers if mixer is not None)
    return "d/h" if divided else "d_k"


def axis_sizes(config: ModelConfig, *, tokens: int, sequences: int) -> tuple[tuple[str, int], ...]:
    """The letters of the formulas and their sizes for this model and prompt."""
    mixer, ffn = first_attention(config), first_mlp(config)
    return (
        ("n", tokens),
        ("d", config.width),
        ("h", mixer.heads),
        *((("h_kv", mixer.kv_heads),) if mixer.kv_heads != mixer.heads else ()),
        (head_size(config), mixer.head_dim),
        *((("d_v", mixer.value_dim),) if mixer.value_dim != mixer.head_dim else ()),
        *((("F", ffn.hidden),) if ffn is not None else ()),
        ("v", config.vocab),
        ("b", sequences),
        ("layers", len(config.layers)),
    )
