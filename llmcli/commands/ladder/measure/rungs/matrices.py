"""Rung 3: vectors of vectors become matrices, `softmax(Q Kᵀ / √(d/h) + M) V`, head by head.

The n vectors of the prompt are the rows of one matrix, and the loops over tokens are gone.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.arithmetic import (
    TENSORS,
    Function,
    mask,
    normalized,
    soft_cap,
    softmax,
)
from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.walk import HeadByHead
from llmcli.commands.ladder.measure.weights import AttentionWeights, Matrix, NormWeights
from llmcli.parts.attention.config import AttentionConfig


class Matrices(HeadByHead):
    """The forward pass on `[n, d]` matrices, with a loop over the heads."""

    number: ClassVar[int] = 3
    name: ClassVar[str] = "matrices"

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
            s_nm = soft_cap(s_nm, mixer.cap, TENSORS)  # cap · tanh(S / cap)
        if m_nm is not None:
            s_nm = s_nm + m_nm  # S + M
        a_nm = softmax(s_nm, sink)  # A = softmax(S), row by row: each sums to 1
        c_ne = a_nm @ v_me  # C = A V
        return c_ne

    def mask(self, mixer: AttentionConfig) -> Tensor | None:
        """M, which hides the later tokens and those before the window."""
        return mask(self.count, mixer.window).to(self.weights.W_E)
