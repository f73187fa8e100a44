"""Rungs 2 to 8: vectors, matrices, an axis of heads, one QKV, the cache, a batch, fused kernels.

A prompt is a list of vectors on rung 2, the rows of one matrix from rung 3 on. Of a new token only
one row is computed from rung 6 on: axis n is then of size 1, beside the m tokens so far.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.walk import (
    Function,
    Rows,
    Rung,
    Walk,
    rotated,
    soft_cap,
    softmax,
)
from llmcli.commands.ladder.measure.weights import (
    AttentionWeights,
    Matrix,
    Projection,
    Weights,
    side_by_side,
)
from llmcli.config.attention import AttentionConfig, ScoreConfig, first_key
from llmcli.engine.session import Session
from llmcli.parts.attention import Attention


class Matrices(Walk):
    """The forward pass on `[n, d]` matrices, with a loop over the heads."""

    @shown
    def contexts(self, t_nd: Rows, layer: AttentionWeights) -> Rows:
        """Every head's contexts, side by side: C = C¹ ⊕ … ⊕ Cʰ."""
        mixer, contexts = layer.config, []
        k_gmk, v_gme = self.keys_values(t_nd, layer)
        group = mixer.heads // mixer.kv_heads  # heads that share keys and values
        for head, q_nk in enumerate(self.queries(t_nd, layer)):
            sink = None if layer.sinks is None else layer.sinks[head]
            k_mk, v_me = k_gmk[head // group], v_gme[head // group]
            c_ne = self.attend(q_nk, k_mk, v_me, mixer.scores, sink)
            contexts.append(c_ne)
        return self.merge(contexts)

    @shown
    def queries(self, t_nd: Rows, layer: AttentionWeights) -> list[Rows]:
        """`Q = T W_q` of every head, as they enter the scores."""
        q_hnk = self.projected(t_nd, layer.q)
        return [self.placed("Q", q_nk, layer.config) for q_nk in q_hnk]

    @shown
    def keys_values(
        self, t_nd: Rows, layer: AttentionWeights
    ) -> tuple[list[Tensor], list[Tensor]]:
        """`K = T W_k` and `V = T W_v` of every key/value head: row m is that of token m."""
        k_gnk = self.projected(t_nd, layer.k)
        k_gmk = [self.stacked(self.placed("K", k_nk, layer.config)) for k_nk in k_gnk]
        v_gme = [self.stacked(v_ne) for v_ne in self.projected(t_nd, layer.v)]
        return k_gmk, v_gme

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
        growth = mixer.scores.growth
        if letter == "Q" and growth is not None:
            # 1 + β ln(1 + ⌊p / original⌋) of each position p
            at = self.positions + growth.first
            steps = torch.div(at, growth.original, rounding_mode="floor")
            factors = (1 + growth.beta * torch.log1p(steps.double())).to(self.weights.W_E)
            x_nk = self.each(lambda x, f: x * f, x_nk, self.unstacked(factors.unsqueeze(-1)))
        return x_nk

    @shown
    def merge(self, c_hne: Any) -> Rows:
        """The heads' context matrices side by side: C = C¹ ⊕ … ⊕ Cʰ."""
        c_nc = torch.cat(c_hne, 1)
        return c_nc

    @shown
    def attend(
        self, q_nk: Rows, k_mk: Tensor, v_me: Tensor, scores: ScoreConfig, sink: Tensor | None
    ) -> Rows:
        """`softmax(Q Kᵀ / √(d/h) + M) V`: −∞ in the mask M hides a key from a query."""
        k_km = k_mk.mT  # Kᵀ
        s_nm = q_nk @ k_km * scores.scale  # S = Q Kᵀ / √(d/h)
        if scores.cap is not None:
            s_nm = soft_cap(s_nm, scores.cap)  # cap · tanh(S / cap)
        m_nm = self.mask(scores)  # M; none for a single row that sees all
        if m_nm is not None:
            s_nm = s_nm + m_nm  # S + M
        a_nm = softmax(s_nm, sink)  # A = softmax(S), row by row: each sums to 1
        c_ne = a_nm @ v_me  # C = A V
        return c_ne

    def mask(self, scores: ScoreConfig) -> Tensor | None:
        """M, which hides the later tokens and those before the window; made once for all heads."""
        if scores.window not in self.masks:
            hidden = torch.full((self.count, self.count), -torch.inf)
            m_nm = hidden.triu(1)
            if scores.window is not None:
                at = torch.arange(self.count)
                m_nm = m_nm.masked_fill(at < first_key(at[:, None], scores.window), -torch.inf)
            self.masks[scores.window] = m_nm.to(self.weights.W_E)
        return self.masks[scores.window]


class VectorRows(Matrices):
    """The forward pass token by token; each token's arithmetic is vectors times matrices.

    The rows of a prompt are a list of tensors `[d]`.
    """

    def stacked(self, x_ni: list[Tensor]) -> Tensor:
        """`[n, …]`."""
        return torch.stack(x_ni)

    def unstacked(self, x_ni: Tensor) -> list[Tensor]:
        """Its rows, views."""
        return list(x_ni)

    def each(self, f: Function, *x_ni: list[Tensor]) -> list[Tensor]:
        """Row by row."""
        return [f(*rows) for rows in zip(*x_ni, strict=True)]

    def merge(self, c_hne: list[list[Tensor]]) -> list[Tensor]:
        """Token by token: c = c¹ ⊕ … ⊕ cʰ."""
        return self.each(lambda *c: torch.cat(c), *c_hne)

    @shown
    def attend(
        self,
        q_nk: list[Tensor],
        k_nk: Tensor,
        v_ne: Tensor,
        scores: ScoreConfig,
        sink: Tensor | None,
    ) -> list[Tensor]:
        """`softmax(q Kᵀ / √(d/h)) V` of every query, over the tokens that it may see."""
        c_ne = []
        for i, q_k in enumerate(q_nk):
            first = 0 if scores.window is None else max(0, first_key(i, scores.window))
            k_mk, v_me = k_nk[first : i + 1], v_ne[first : i + 1]
            k_km = k_mk.mT  # Kᵀ
            s_m = q_k @ k_km * scores.scale  # s = q Kᵀ / √(d/h)
            if scores.cap is not None:
                s_m = soft_cap(s_m, scores.cap)  # cap · tanh(s / cap)
            a_m = softmax(s_m, sink)  # a = softmax(s)
            c_e = a_m @ v_me  # c = a V
            c_ne.append(c_e)
        return c_ne


class HeadsAsDimension(Matrices):
    """The forward pass on tensors with an axis of heads."""

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
        c_hne = self.attend(q_hnk, k_hmk, v_hme, mixer.scores, sinks)
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

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.caches: dict[int, Cache] = {}  # by their block

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[n, v]`, the cache filled; with `until=i` the rows `[n, d]` after block i."""
        self.caches = self.new_caches(ids)
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
        window, cache = layer.config.scores.window, self.caches[layer.block]
        cache.write(k_gnk, v_gne, self.first)
        last = self.first + self.count
        first = 0 if window is None or not self.first else max(0, first_key(last - 1, window))
        k_gmk, v_gme = cache.keys[..., first:last, :], cache.values[..., first:last, :]
        return k_gmk, v_gme

    def mask(self, scores: ScoreConfig) -> Tensor | None:
        """None for a single row, which sees all that is kept."""
        return None if self.first else super().mask(scores)


class Batch(KeyValueCache):
    """The forward pass of several sequences at once, `[b, n]` ids, prompt and cached rows alike.

    No line of arithmetic changes: every operation of rung 6 counts its axes from the last one on,
    and there is one more before them. Its caches have the axes that the ids have.
    """

    batched: ClassVar[bool] = True


class FusedKernels(Rung):
    """The project's own decoder, with its cache."""

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
