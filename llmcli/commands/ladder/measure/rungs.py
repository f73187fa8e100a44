"""Rungs 2 to 8: vectors, matrices, an axis of heads, one QKV, the cache, a batch, fused kernels.

A prompt is a list of vectors on rung 2, the rows of one matrix from rung 3 on. Of a new token only
one row is computed from rung 6 on: axis n is then of size 1, beside the m tokens so far.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.walk import (
    Function,
    Rows,
    Rung,
    Walk,
    normalized,
    rotated,
    soft_cap,
    softmax,
    times,
)
from llmcli.commands.ladder.measure.weights import (
    AttentionWeights,
    Matrix,
    NormWeights,
    Projection,
    Weights,
    side_by_side,
)
from llmcli.engine.session import Session
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.attention.forward import Attention


class HeadByHead(Walk):
    """A walk on rows of tensors, whose queries, keys and values are made head by head."""

    @abstractmethod
    def unstacked(self, x_ni: Tensor) -> Rows:
        """The rows of a tensor `[n, …]`."""

    def product(self, x_ni: Rows, matrix: Matrix) -> Rows:
        """`X W + B`, row by row or all rows at once."""
        return self.each(lambda x: times(x, matrix), x_ni)

    def norm(self, x_ni: Rows, norm: NormWeights) -> Rows:
        """Row by row or all rows at once."""
        return self.each(lambda x: normalized(x, norm), x_ni)

    @shown
    def queries(self, t_nd: Rows, layer: AttentionWeights) -> list[Rows]:
        """`Q = T W_q` of every head, as they enter the scores."""
        q_hnk = self.projected(t_nd, layer.q)
        return [self.placed("Q", q_nk, layer.config) for q_nk in q_hnk]

    @shown
    def keys_values(self, t_nd: Rows, layer: AttentionWeights) -> tuple[list[Rows], list[Rows]]:
        """`K = T W_k` and `V = T W_v` of every key/value head, as they enter the products."""
        k_gnk = self.projected(t_nd, layer.k)
        k_gnk = [self.placed("K", k_nk, layer.config) for k_nk in k_gnk]
        v_gne = self.projected(t_nd, layer.v)
        return k_gnk, v_gne

    def projected(self, t_nd: Rows, matrix: Projection) -> list[Rows]:
        """`T W` of every head, whose W is columns of the stored one, a view; normalized."""
        x_hnk = [self.product(t_nd, one) for one in matrix.split()]
        if matrix.norm is None:
            return x_hnk
        if not matrix.together:
            return [self.norm(x_nk, matrix.norm) for x_nk in x_hnk]
        whole = self.norm(self.each(lambda *x: torch.cat(x, -1), *x_hnk), matrix.norm)
        heads = range(matrix.heads)
        return [self.each(lambda x, i=i: x.chunk(len(heads), -1)[i], whole) for i in heads]

    def placed(self, letter: str, x_nk: Rows, mixer: AttentionConfig) -> Rows:
        """Queries or keys rotated by their position, if the model rotates; queries grown."""
        if mixer.rope is not None:
            turns = (self.unstacked(one) for one in self.turns(mixer.rope))
            x_nk = self.each(rotated, x_nk, *turns)
        if letter == "Q" and mixer.growth is not None:
            # 1 + β ln(1 + ⌊p / original⌋) of each position p
            steps = torch.div(self.positions, mixer.growth.original, rounding_mode="floor")
            factors = (1 + mixer.growth.beta * torch.log1p(steps.double())).to(self.weights.W_E)
            x_nk = self.each(lambda x, f: x * f, x_nk, self.unstacked(factors.unsqueeze(-1)))
        return x_nk


class VectorRows(HeadByHead):
    """The forward pass token by token; each token's arithmetic is vectors times matrices."""

    title = "one query at a time: its scores and its context are one product each"
    before = """\
for every t_k: k = t_k × W_k, score = q · k; for every t_v: c += a · v
for every neuron: Activation(t · weights + bias)"""
    here = """\
k_i = t_i W_k and v_i = t_i W_v once, stacked as the rows of K and V
for every t_q: c = softmax(q Kᵀ / √(d/h)) V
Layer = Activation(x W + b): all neurons of one token at once"""
    idea = """
A key depends on its own token only, so it is computed once instead of for every query; the scores
of one query are then the dot products of q with the rows of K, that is, with the columns of Kᵀ, and
the weighted sum of the values is a product as well. The same multiplications and sums, but a
product of a row with a matrix (GEMV) does d/h × n of them in one call, and the n² computations of
keys and values are n. A neuron's weights are a column of W, so that x W is the sums of all of them.
W is [in, out] here; checkpoints often store Wᵀ and write W @ x with x as a column."""

    # The rows of a prompt are a list of tensors `[d]`.

    def stacked(self, x_ni: list[Tensor]) -> Tensor:
        """`[n, …]`."""
        return torch.stack(x_ni)

    def unstacked(self, x_ni: Tensor) -> list[Tensor]:
        """Its rows, views."""
        return list(x_ni)

    def rows_of(self, table: Tensor, indices: Tensor) -> list[Tensor]:
        """One after the other."""
        return [table[i] for i in indices.tolist()]

    def each(self, f: Function, *x_ni: list[Tensor]) -> list[Tensor]:
        """Row by row."""
        return [f(*rows) for rows in zip(*x_ni, strict=True)]

    @shown
    def contexts(self, t_nd: list[Tensor], layer: AttentionWeights) -> list[Tensor]:
        """Every head's contexts, concatenated token by token: c = c¹ ⊕ … ⊕ cʰ."""
        mixer, contexts = layer.config, []
        keys, values = self.keys_values(t_nd, layer)
        k_gmk = [torch.stack(k_nk) for k_nk in keys]  # the rows of K: k of every token
        v_gme = [torch.stack(v_ne) for v_ne in values]
        group = mixer.heads // mixer.kv_heads  # heads that share keys and values
        for head, q_nk in enumerate(self.queries(t_nd, layer)):
            sink = None if layer.sinks is None else layer.sinks[head]
            contexts.append(
                self.head(q_nk, k_gmk[head // group], v_gme[head // group], mixer, sink)
            )
        return self.each(lambda *c: torch.cat(c), *contexts)

    @shown
    def head(
        self, q_nk: list[Tensor], k_nk: Tensor, v_ne: Tensor, mixer: AttentionConfig,
        sink: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """`softmax(q Kᵀ / √(d/h)) V` of every query, over the tokens that it may see."""
        c_ne = []
        for i, q_k in enumerate(q_nk):
            first = 0 if mixer.window is None else max(0, i + 1 - mixer.window)
            k_mk, v_me = k_nk[first : i + 1], v_ne[first : i + 1]
            k_km = k_mk.mT  # Kᵀ
            s_m = q_k @ k_km * mixer.scale  # s = q Kᵀ / √(d/h)
            if mixer.cap is not None:
                s_m = soft_cap(s_m, mixer.cap)  # cap · tanh(s / cap)
            a_m = softmax(s_m, sink)  # a = softmax(s)
            c_e = a_m @ v_me  # c = a V
            c_ne.append(c_e)
        return c_ne


class Matrices(HeadByHead):
    """The forward pass on `[n, d]` matrices, with a loop over the heads."""

    title = "vectors of vectors become matrices, one head at a time"
    before = """\
for every t_q: c = softmax(q Kᵀ / √(d/h)) V
for every token: Layer = Activation(x W + b)"""
    here = """\
Q = T W_q, K = T W_k, V = T W_v[rotates:; Q = R(position) Q, K = R(position) K]
Attention(Q, K, V) = softmax(Q Kᵀ / √(d/h) + M) V
Layer = Activation(X W + B) for all tokens at once, F neurons"""
    idea = """
Row i of a product X W is x_i W, so the n products of a row are one product of matrices (GEMM),
which reads W once instead of n times; row i of B is b, for every i. A product takes columns on its
right, and the keys are the rows of K: hence Kᵀ, a view that moves nothing. Now every query meets
every key, and the mask M (−∞ above the diagonal) hides the later tokens before the softmax; the
half of Q Kᵀ that it hides is computed in vain and still cheaper than a loop. The formula is often
written without the mask, and even without the transpose; it needs both. The activation follows the
hidden layer only."""

    # The rows of a prompt are a matrix.

    def stacked(self, x_ni: Tensor) -> Tensor:
        """X itself."""
        return x_ni

    def unstacked(self, x_ni: Tensor) -> Tensor:
        """X itself."""
        return x_ni

    def rows_of(self, table: Tensor, indices: Tensor) -> Tensor:
        """All at once."""
        return table[indices]

    def each(self, f: Function, *x_ni: Tensor) -> Rows:
        """All numbers at once."""
        return f(*x_ni)

    @shown
    def contexts(self, t_nd: Tensor, layer: AttentionWeights) -> Tensor:
        """Every head's context matrix, side by side: C = C¹ ⊕ … ⊕ Cʰ."""
        mixer, contexts, m_nm = layer.config, [], self.mask(layer.config)
        k_gmk, v_gme = self.keys_values(t_nd, layer)
        group = mixer.heads // mixer.kv_heads  # heads that share keys
        for head, q_nk in enumerate(self.queries(t_nd, layer)):
            sink = None if layer.sinks is None else layer.sinks[head]
            k_mk, v_me = k_gmk[head // group], v_gme[head // group]
            contexts.append(self.attend(q_nk, k_mk, v_me, m_nm, mixer, sink))
        c_nc = torch.cat(contexts, 1)
        return c_nc

    @shown
    def attend(
        self, q_nk: Tensor, k_mk: Tensor, v_me: Tensor, m_nm: Tensor | None,
        mixer: AttentionConfig, sink: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """`softmax(Q Kᵀ / √(d/h) + M) V`: −∞ in the mask M hides a key from a query."""
        k_km = k_mk.mT  # Kᵀ
        s_nm = q_nk @ k_km * mixer.scale  # S = Q Kᵀ / √(d/h)
        if mixer.cap is not None:
            s_nm = soft_cap(s_nm, mixer.cap)  # cap · tanh(S / cap)
        if m_nm is not None:
            s_nm = s_nm + m_nm  # S + M
        a_nm = softmax(s_nm, sink)  # A = softmax(S), row by row: each sums to 1
        c_ne = a_nm @ v_me  # C = A V
        return c_ne

    def mask(self, mixer: AttentionConfig) -> Tensor | None:
        """M, which hides the later tokens and those before the window."""
        hidden = torch.full((self.count, self.count), -torch.inf)
        m_nm = hidden.triu(1)
        if mixer.window is not None:
            m_nm = m_nm + hidden.tril(-mixer.window)
        return m_nm.to(self.weights.W_E)


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


KEPT = """
[window: A block with a window of W = {window} keeps all keys, reads the last W.]
[rotates: Keys are kept rotated: a key's position does not change. (Where a model changes the
rotation itself with the length, as dynamic NTK and LongRoPE do past the trained length, the kept
ones are those of a shorter sequence and the numbers differ a little.)]"""


class Cache:
    """Keys (rotated) and values of one block, `[…, h_kv, C, …]`: C slots, at least one per token.

    Slots are allocated ahead, twice as many each time they run out: concatenating a row to K, as
    the documents draw it, copies all rows before it at every token.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def write(self, K: Tensor, V: Tensor, start: int) -> None:
        """Rows of K and V, `[…, h_kv, rows, …]`, into the slots from `start` on."""
        slots, stop = self.keys.shape[-2], start + K.shape[-2]
        if stop > slots:
            more = (0, 0, 0, max(stop, 2 * slots, 32) - slots)
            self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)
        self.keys[..., start:stop, :] = K
        self.values[..., start:stop, :] = V


class KeyValueCache(CombinedQKV):
    """The forward pass of a prompt, then of one row for every token after it."""

    title = "KV cache: a new token computes its own row only"
    before = "for a new token n rows again: softmax(Q Kᵀ / √(d/h) + M) V"
    here = """\
for a new token its own row only: Q_n, K_n, V_n = split(T_n W_qkv)
K and V: the kept rows and the new one[rotates: (rotated)]
Attention(Q_n, K, V) = softmax(Q_n Kᵀ / √(d/h)) V"""
    idea = """
The next token depends on the last row of the output only, and that row on Q's last row and on all
rows of K and V, which under a causal mask never change once computed: they are kept, and n rows of
work become one, every product a GEMV. Queries are not kept. The last row sees all keys and needs no
mask: true for one whole sequence, not for a prompt in chunks or a batch padded to one length. What
comes out is one row of v logits.""" + KEPT

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.caches: dict[int, Cache] = {}  # by their block
        self.new = False  # whether a single new row is computed

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[n, v]`, the cache filled; with `until=i` the rows `[n, d]` after block i."""
        self.new, self.caches = False, self.new_caches(ids)
        rows = super().forward(ids, until)
        if until is not None:
            self.caches = {}  # not filled by all blocks: nothing to extend
        return rows

    @torch.inference_mode()
    @shown
    def extend(self, id: Tensor) -> Tensor:
        """Reads one more token, `[]`: its logits `[v]`, from its own row and the cache.

        Raises ValueError where no prompt was read before.
        """
        if not self.caches:
            raise ValueError("nothing to extend: no prompt was read to its end")
        self.new = True
        logits_nv = self.read(id.unsqueeze(-1))  # n = 1
        return logits_nv[..., -1, :]

    def new_caches(self, ids: Tensor) -> dict[int, Cache]:
        """An empty one for every block."""
        found = {}
        for layer in self.weights.attentions:
            mixer, W = layer.config, layer.k.W
            shape = *ids.shape[:-1], mixer.kv_heads, 0
            keys = W.new_zeros(*shape, mixer.head_dim)
            found[layer.block] = Cache(keys, W.new_zeros(*shape, mixer.value_dim))
        return found

    @shown
    def kept(
        self, k_gnk: Tensor, v_gne: Tensor, layer: AttentionWeights
    ) -> tuple[Tensor, Tensor]:
        """The slots of K and V that the new rows read, as views: of one row, its window only.

        The new rows are written behind those of the tokens before.
        """
        window, cache = layer.config.window, self.caches[layer.block]
        cache.write(k_gnk, v_gne, self.first)
        last = self.first + self.count
        first = 0 if window is None or not self.new else max(0, last - window)
        k_gmk, v_gme = cache.keys[..., first:last, :], cache.values[..., first:last, :]
        return k_gmk, v_gme

    def mask(self, mixer: AttentionConfig) -> Tensor | None:
        """None for a single row, which sees all that is kept."""
        return None if self.new else super().mask(mixer)


class Batch(KeyValueCache):
    """The forward pass of several sequences at once, `[b, n]` ids, prompt and cached rows alike.

    No line of arithmetic changes: every operation of rung 6 counts its axes from the last one on,
    and there is one more before them. Its caches have the axes that the ids have.
    """

    title = "a batch: several sequences at once, one rank higher"
    before = "activations of one sequence: n × d, heads h × n × d/h; logits n × v"
    here = """\
activations of b sequences: b × n × d, heads b × h × n × d/h
logits b × n × v; the weights as before: they have no b"""
    idea = """
Sequences do not see each other, so b of them are one more leading dimension that the library loops
over, like the heads; the weights have none. Each number is computed as before. What is saved is
reading: a weight fetched from memory serves b rows, so the GEMVs of a new token become products of
b rows. Only the cache grows with b, b × [shared:h_kv][apart:h] × n × d/h for keys. Here the
sequences have equal lengths; shorter ones would be padded, and then the last row needs its mask
back.""" + KEPT
    batched: ClassVar[bool] = True


class FusedKernels(Rung):
    """The project's own decoder, with its cache."""

    title = "fused kernels: the decoder that llmcli runs"
    before = "Q Kᵀ, scale, + M, softmax (5), A V: 9 kernels, 6 tensors of n × n"
    here = """\
attend(Q, K, V): one kernel, no n × n tensor[gated:
G and U in one product, too]"""
    idea = """
Fewer, larger kernels for the same formulas. Attention is one call that goes through K and V in
blocks and keeps a running maximum and sum for the softmax, so that the n × n scores never lie in
memory and, where the kernel is told that the mask is causal, need not be computed above the
diagonal. The weights of queries and keys and values[gated:, and of gate and up,] lie one after the
other as the model is loaded (no copy for this rung); bias and product are one kernel, and so are
the steps of a norm. The sums are taken in another order: the same numbers to rounding. The cache
has room for the whole sequence and is written in place."""
    batched: ClassVar[bool] = True

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.session: Session | None = None
        self.stored(f"blocks.{weights.attentions[0].block}.attn")

    @shown
    def stored(self, name: str) -> list[Tensor]:
        """W_q, W_k and W_v as loaded, `[out, in]`: the first, next and last rows of one W_qkv."""
        decoder = self.weights.decoder
        mixer = decoder.blocks[self.weights.attentions[0].block].parts[name]
        assert isinstance(mixer, Attention)
        w_jd = mixer.qkv.weight.dense()
        w_q_cd = decoder.weight(f"{name}.W_q").dense()
        w_k_cd = decoder.weight(f"{name}.W_k").dense()
        w_v_cd = decoder.weight(f"{name}.W_v").dense()
        return [w_jd, w_q_cd, w_k_cd, w_v_cd]

    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[b, n, v]` of `[b, n]` ids; with `until=i` the rows `[b, n, d]`."""
        return self.weights.decoder(ids, until=until, tap=self.tap)

    @shown
    def start(self, ids: Tensor) -> Tensor:
        """The decoder reads a prompt: the cache has room for some tokens after it."""
        batch, n = ids.shape
        self.session = Session(self.weights.decoder, batch, max(2 * n, 32))
        logits_bnv = self.session.extend(ids, logits="all", tap=self.tap)
        return logits_bnv

    @shown
    def extend(self, id: Tensor) -> Tensor:
        """Reads one more token of each sequence, `[b]`: their logits `[b, v]`.

        Raises ValueError where no prompt was read before.
        """
        if self.session is None:
            raise ValueError("nothing to extend: no prompt was read")
        n = self.session.lengths[0]
        if n == self.session.state.capacity:
            self.session.grow(2 * n)
        logits_bv = self.session.extend(id.unsqueeze(1), tap=self.tap)
        return logits_bv
