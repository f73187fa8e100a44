"""Rungs 4 and 5: heads are a dimension; one matrix for queries, keys and values."""

from __future__ import annotations

from torch import Tensor

from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.rungs.matrices import Matrices
from llmcli.commands.ladder.measure.weights import (
    AttentionWeights,
    Matrix,
    Projection,
    Weights,
    side_by_side,
)


class HeadsAsDimension(Matrices):
    """The forward pass on tensors with an axis of heads."""

    title = "heads are a dimension: all of them in one batched product"
    before = "for every head: Q = T W_q …; softmax(Q Kᵀ / √(d/h) + M) V"
    here = """\
Q = T (W_q¹ ⊕ … ⊕ W_qʰ), K and V alike[rotates:; Q = R(position) Q, K = R(position) K]
n × d → n × h × d/h → h × n × d/h: two views
softmax(Q Kᵀ / √(d/h) + M) V for all heads in one call"""
    idea = """
A product works column by column, so weights concatenated by columns give the heads' queries side by
side: one product instead of h. Seeing n × d as n × h × d/h and that as h × n × d/h moves no number,
only the strides change; a library loops over the leading dimension by itself. Merging the heads
back does move them: a row of n × d wants numbers of every head side by side, which h × n × d/h has
far apart, so that is a copy. One head's output is n × d/h, neither n × n/h nor n × d, as it is
sometimes given.
[shared: Several heads share a key and a value: a batched product wants a pair of matrices for every
head, so both are repeated h/h_kv times, a copy that rung 8 does without.]"""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.entering = {layer.block: self.own_matrices(layer) for layer in weights.attentions}

    def own_matrices(self, layer: AttentionWeights) -> list[Matrix]:
        """W_q, W_k and W_v: the weights of the single heads put side by side, copies."""
        return [side_by_side(one.split()) for one in layer.entering]

    @shown
    def contexts(self, t_nd: Tensor, layer: AttentionWeights) -> Tensor:
        """`softmax(Q Kᵀ / √(d/h) + M) V` of all heads at once, merged."""
        mixer = layer.config
        q_nc, k_nc, v_nc = self.queries_keys_values(t_nd, layer)
        q_hnk = self.split(q_nc, layer.q)
        k_gnk = self.split(k_nc, layer.k)
        v_gne = self.split(v_nc, layer.v)
        q_hnk, k_gnk = self.placed("Q", q_hnk, mixer), self.placed("K", k_gnk, mixer)
        k_hmk, v_hme = self.kept(k_gnk, v_gne, layer)
        if mixer.kv_heads < mixer.heads:
            k_hmk = k_hmk.repeat_interleave(mixer.heads // mixer.kv_heads, -3)
            v_hme = v_hme.repeat_interleave(mixer.heads // mixer.kv_heads, -3)
        sinks = None if layer.sinks is None else layer.sinks[:, None, None]
        c_hne = self.attend(q_hnk, k_hmk, v_hme, self.mask(mixer), mixer, sinks)
        return self.merge(c_hne)

    @shown
    def queries_keys_values(self, t_nd: Tensor, layer: AttentionWeights) -> list[Tensor]:
        """Q = T W_q, K = T W_k and V = T W_v of all heads side by side."""
        w_q, w_k, w_v = self.entering[layer.block]
        q_nc = self.product(t_nd, w_q)
        k_nc = self.product(t_nd, w_k)
        v_nc = self.product(t_nd, w_v)
        return [q_nc, k_nc, v_nc]

    def kept(
        self, k_gnk: Tensor, v_gne: Tensor, layer: AttentionWeights
    ) -> tuple[Tensor, Tensor]:
        """The keys and values that a block reads, `[h_kv, m, …]`: here those of its rows."""
        return k_gnk, v_gne

    @shown
    def split(self, x_nc: Tensor, matrix: Projection) -> Tensor:
        """`[n, h·d/h]` as `[h, n, d/h]`: two views; each head normalized, or all together."""
        norm, together = matrix.norm, matrix.together
        if norm is not None and together:
            x_nc = self.norm(x_nc, norm)
        x_nhk = x_nc.view(*x_nc.shape[:-1], matrix.heads, -1)
        x_hnk = x_nhk.transpose(-3, -2)
        if norm is not None and not together:
            x_hnk = self.norm(x_hnk, norm)
        return x_hnk

    @shown
    def merge(self, c_hne: Tensor) -> Tensor:
        """`[h, n, d/h]` back to `[n, h·d/h]`: the transpose is a view, the rows must be copied."""
        c_nhe = c_hne.transpose(-3, -2)
        c_nc = c_nhe.flatten(-2)
        return c_nc


class CombinedQKV(HeadsAsDimension):
    """The forward pass with one product for the queries, keys and values of all heads."""

    title = "combined QKV: one product instead of three"
    before = "Q = T W_q, K = T W_k, V = T W_v"
    here = """\
W_qkv = W_q ⊕ W_k ⊕ W_v, as the model is built
Q, K, V = split(T W_qkv)"""
    idea = """
The same columns side by side in one matrix give the same numbers side by side in one product, and
the three slices of it are views: Q, K and V. Nothing is saved in arithmetic: what two calls less
save is their fixed cost, and one wide product fills a machine better than three narrow ones.
[shared: Here heads share keys and values: K and V are narrower than Q.]"""

    def own_matrices(self, layer: AttentionWeights) -> list[Matrix]:
        """W_qkv alone."""
        return [side_by_side(layer.entering)]

    @shown
    def queries_keys_values(self, t_nd: Tensor, layer: AttentionWeights) -> list[Tensor]:
        """Q, K, V = split(T W_qkv): views of one product, its first, next and last columns."""
        (w_qkv,) = self.entering[layer.block]
        qkv_nj = self.product(t_nd, w_qkv)
        columns = [matrix.W.shape[1] for matrix in layer.entering]
        q_nc, k_nc, v_nc = qkv_nj.split_with_sizes(columns, -1)
        return [q_nc, k_nc, v_nc]
