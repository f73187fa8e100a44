"""Rung 3: the vectors of a prompt are the rows of one matrix, heads one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.arithmetic import Function, normalized, soft_cap, softmax
from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.walk import HeadByHead
from llmcli.commands.ladder.measure.weights import AttentionWeights, Matrix, NormWeights
from llmcli.parts.attention.config import AttentionConfig


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
        """The same."""
        return x_ni

    def unstacked(self, x_ni: Tensor) -> Tensor:
        """The same."""
        return x_ni

    def rows_of(self, table: Tensor, indices: Tensor) -> Tensor:
        """All at once."""
        return table[indices]

    def each(self, f: Function, *x_ni: Tensor) -> Tensor:
        """All numbers at once."""
        y_ni: Tensor = f(*x_ni)
        return y_ni

    @shown
    def product(self, x_ni: Tensor, matrix: Matrix) -> Tensor:
        """`Y = X W + B`: all rows at once (GEMM), b added to every row where there is one."""
        y_nj = x_ni @ matrix.W
        if matrix.b is not None:
            y_nj = y_nj + matrix.b
        return y_nj

    def norm(self, x_ni: Tensor, norm: NormWeights) -> Tensor:
        """All rows at once."""
        return normalized(x_ni, norm)

    # Attention.

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
