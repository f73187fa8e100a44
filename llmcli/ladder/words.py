"""What each rung changes and why it gives the same numbers, said of the model that it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmcli.ladder.letters import Letters


@dataclass(frozen=True)
class Words:
    """`change`: the formula of the rung below and this one's; `idea`: why that is the same."""

    change: tuple[str, str]
    idea: str


def words(name: str, of: Letters) -> Words:
    """Those of the rung `name` for a model whose first block has the letters `of`."""
    return _WORDS[name](of)


def _loops(of: Letters) -> Words:
    turned = ", turned by their positions," if of.rotates else ""
    rotated = [" and q_rot = R(position) q", " and k_rot = R(position) k"]
    q_rot, k_rot = rotated if of.rotates else ("", "")
    return Words(
        (
            "an LLM as concepts: every token asks all tokens before it",
            f"""\
1      for every token t_q:
1.1      q = t_q × W_q{q_rot}
1.2      for every token t_k up to t_q:
1.2.1      k = t_k × W_k{k_rot}
1.2.2      score = {of.placed("q")} · {of.placed("k")}
1.3      a = softmax({of.scaled("score")}) over the scores of this t_q
1.4      for every token t_v up to t_q:
1.4.1      v = t_v × W_v
1.4.2      its part of the context: a · v
1.5      c = the sum of these parts
2      for every token, every neuron: Activation(t · weights + bias)""",
        ),
        f"Each token's query and every token's key{turned} are compared; the scores, scaled and "
        "through a softmax, say how much of each token's value goes into its context. Done "
        "literally, keys and values are computed again for every query and every head: n² "
        "vector-matrix products where n would do. The loop over t_k is usually written over all "
        "n tokens, and the later ones are masked; here it ends at the query's own token, which "
        "gives the same.",
    )


def _rows(of: Letters) -> Words:
    q, K = of.placed("q"), of.placed("K")
    return Words(
        (
            "for every t_k: k = t_k × W_k, score = q · k; for every t_v: c += a · v\n"
            "for every neuron: Activation(t · weights + bias)",
            "k_i = t_i W_k and v_i = t_i W_v once, stacked as the rows of K and V\n"
            f"for every t_q: c = softmax({of.scaled(f'{q} {K}ᵀ')}) V\n"
            "Layer = Activation(x W + b): all neurons of one token at once",
        ),
        "A key depends on its own token only, so it is computed once instead of for every query; "
        "the scores of one query are then the dot products of q with the rows of K, that is, with "
        "the columns of Kᵀ, and the weighted sum of the values is a product as well. The same "
        "multiplications and sums, but a product of a row with a matrix (GEMV) does d/h × n of "
        "them in one call, and the n² computations of keys and values are n. A neuron's weights "
        "are a column of W, so that x W is the sums of all of them. W is [in, out] here; "
        "checkpoints often store Wᵀ and write W @ x with x as a column.",
    )


def _matrices(of: Letters) -> Words:
    q, Q, K = (of.placed(letter) for letter in "qQK")
    attention = f"Attention({Q}, {K}, V) = softmax({of.scaled(f'{Q} {K}ᵀ')} + M) V"
    return Words(
        (
            f"for every t_q: c = softmax({of.scaled(f'{q} {K}ᵀ')}) V\n"
            "for every token: Layer = Activation(x W + b)",
            f"Q = T¹ W_q, K = T¹ W_k, V = T¹ W_v{of.rotation}\n{attention}\n"
            f"Layer = Activation(X W + B) for all tokens at once, {of.F} neurons",
        ),
        "Row i of a product X W is x_i W, so the n products of a row are one product of matrices "
        "(GEMM), which reads W once instead of n times; row i of B is b, for every i. A product "
        "takes columns on its right, and the keys are the rows of K: hence Kᵀ, a view that moves "
        "nothing. Now every query meets every key, and the mask M (−∞ above the diagonal) hides "
        "the later tokens before the softmax; the half of Q Kᵀ that it hides is computed in vain "
        "and still cheaper than a loop. The formula is often written without the mask, and even "
        "without the transpose; it needs both. The activation follows the hidden layer only.",
    )


def _heads(of: Letters) -> Words:
    shared = (
        " Several heads share a key and a value: a batched product wants a pair of matrices for "
        "every head, so both are repeated h/h_kv times, a copy that rung 8 does without."
    )
    Q, K = of.placed("Q"), of.placed("K")
    return Words(
        (
            f"for every head: Q = T¹ W_q …; softmax({of.scaled(f'{Q} {K}ᵀ')} + M) V",
            f"Q = T¹ (W_q¹ ⊕ … ⊕ W_qʰ), K and V alike{of.rotation}\n"
            "n × d → n × h × d/h → h × n × d/h: two views\n"
            f"softmax({of.scaled(f'{Q} {K}ᵀ')} + M) V for all heads in one call",
        ),
        "A product works column by column, so weights concatenated by columns give the heads' "
        "queries side by side: one product instead of h. Seeing n × d as n × h × d/h and that as "
        "h × n × d/h moves no number, only the strides change; a library loops over the leading "
        "dimension by itself. Merging the heads back does move them: a row of n × d wants numbers "
        "of every head side by side, which h × n × d/h has far apart, so that is a copy. One "
        "head's output is n × d/h, neither n × n/h nor n × d, as it is sometimes given."
        + (shared if of.shared else ""),
    )


def _combined(of: Letters) -> Words:
    narrow = " Here heads share keys and values: K and V are narrower than Q."
    return Words(
        (
            "Q = T¹ W_q, K = T¹ W_k, V = T¹ W_v",
            "W_qkv = W_q ⊕ W_k ⊕ W_v, as the model is built\nQ, K, V = split(T¹ W_qkv)",
        ),
        "The same columns side by side in one matrix give the same numbers side by side in one "
        "product, and the three slices of it are views: Q, K and V. Nothing is saved in "
        "arithmetic: what two calls less save is their fixed cost, and one wide product fills a "
        "machine better than three narrow ones." + (narrow if of.shared else ""),
    )


def _cache(of: Letters) -> Words:
    Q, K = of.placed("Q"), of.placed("K")
    window = f" A block with a window of W = {of.mixer.window} keeps all keys and reads the last W."
    rotated = (
        " Keys are kept rotated: a key's position does not change. (Where a model changes the "
        "rotation itself with the length, as dynamic NTK and LongRoPE do past the trained length, "
        "the kept ones are those of a shorter sequence and the numbers differ a little.)"
    )
    return Words(
        (
            f"for a new token n rows again: softmax({of.scaled(f'{Q} {K}ᵀ')} + M) V",
            "for a new token its own row only: Q_n, K_n, V_n = split(T¹_n W_qkv)\n"
            f"K and V: the kept rows and the new one{' (rotated)' if of.rotates else ''}\n"
            f"Attention({Q}_n, {K}, V) = softmax({of.scaled(f'{Q}_n {K}ᵀ')}) V",
        ),
        "The next token depends on the last row of the output only, and that row on Q's last row "
        "and on all rows of K and V, which under a causal mask never change once computed: they "
        "are kept, and n rows of work become one, every product a GEMV. Queries are not kept. "
        "The last row sees all keys and needs no mask: true for one whole sequence, not for a "
        "prompt in chunks or a batch padded to one length. What comes out is one row of v logits."
        + (window if of.mixer.window is not None else "")
        + (rotated if of.rotates else ""),
    )


def _batch(of: Letters) -> Words:
    kept = f"b × {of.h_kv} × n × d/h"
    return Words(
        (
            "activations of one sequence: n × d, heads h × n × d/h; logits n × v",
            "activations of b sequences: b × n × d, heads b × h × n × d/h\n"
            "logits b × n × v; the weights as before: they have no b",
        ),
        "Sequences do not see each other, so b of them are one more leading dimension that the "
        "library loops over, like the heads; the weights have none. Each number is computed as "
        "before. What is saved is reading: a weight fetched from memory serves b rows, so the "
        f"GEMVs of a new token become products of b rows. Only the cache grows with b, {kept} for "
        "keys. Here the sequences have equal lengths; shorter ones would be padded, and then the "
        "last row needs its mask back.",
    )


def _fused(of: Letters) -> Words:
    Q, K = of.placed("Q"), of.placed("K")
    gated = "\nG and U in one product, too" if of.gated else ""
    together = ", and of gate and up," if of.gated else ""
    return Words(
        (
            f"{Q} {K}ᵀ, scale, + M, softmax (5), A V: 9 kernels, 6 tensors of n × n",
            f"attend({Q}, {K}, V): one kernel, no n × n tensor{gated}",
        ),
        "Fewer, larger kernels for the same formulas. Attention is one call that goes through K "
        "and V in blocks and keeps a running maximum and sum for the softmax, so that the n × n "
        "scores never lie in memory and, where the kernel is told that the mask is causal, need "
        f"not be computed above the diagonal. The weights of queries and keys and values{together} "
        "lie one after the other as the model is loaded (no copy for this rung); bias and product "
        "are one kernel, and so are the steps of a norm. The sums are taken in another order: the "
        "same numbers to rounding. The cache has room for the whole sequence and is written in "
        "place.",
    )


_WORDS: dict[str, Callable[[Letters], Words]] = {
    "loops": _loops,
    "rows": _rows,
    "matrices": _matrices,
    "heads": _heads,
    "combined": _combined,
    "cache": _cache,
    "batch": _batch,
    "fused": _fused,
}
