"""Rung 2: one query at a time. Vectors are tensors, products are of a row and a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.arithmetic import Function, normalized, soft_cap, softmax
from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.walk import HeadByHead
from llmcli.commands.ladder.measure.weights import AttentionWeights, Matrix, NormWeights
from llmcli.parts.attention.config import AttentionConfig


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

    def product(self, x_ni: list[Tensor], matrix: Matrix) -> list[Tensor]:
        """Row by row."""
        return [times(x_i, matrix) for x_i in x_ni]

    def norm(self, x_ni: list[Tensor], norm: NormWeights) -> list[Tensor]:
        """Row by row."""
        return [normalized(x_i, norm) for x_i in x_ni]

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


@shown
def times(x_i: Tensor, matrix: Matrix) -> Tensor:
    """`x W + b`: all neurons of a row at once (GEMV)."""
    y_j = x_i @ matrix.W
    if matrix.b is not None:
        y_j = y_j + matrix.b
    return y_j
