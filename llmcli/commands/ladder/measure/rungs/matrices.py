"""Rungs 2 and 3: vectors and matrices, head by head.

A prompt is a list of vectors on rung 2, the rows of one matrix on rung 3.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.arithmetic import (
    Function,
    normalized,
    rotated,
    soft_cap,
    softmax,
    times,
)
from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.walk import Rows, Walk
from llmcli.commands.ladder.measure.weights import (
    AttentionWeights,
    Matrix,
    NormWeights,
    Projection,
)
from llmcli.parts.attention.config import AttentionConfig


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
