"""Rung 4: the heads are a dimension, `n × d` seen as `n × h × d/h` seen as `h × n × d/h`.

The weights of all heads lie side by side in one matrix, made when the model is built, and the
loop over the heads is gone.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.rungs.matrices import Matrices
from llmcli.commands.ladder.measure.weights import (
    AttentionWeights,
    Matrix,
    NormWeights,
    Weights,
    side_by_side,
)


class HeadsAsDimension(Matrices):
    """The forward pass on tensors with an axis of heads."""

    number: ClassVar[int] = 4
    name: ClassVar[str] = "heads"

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.entering = {layer.block: self.own_matrices(layer) for layer in weights.attentions}

    def own_matrices(self, layer: AttentionWeights) -> list[Matrix]:
        """W_q, W_k and W_v: the weights of the single heads put side by side, copies."""
        mixer = layer.config
        counts = (mixer.heads, mixer.kv_heads, mixer.kv_heads)
        return [
            side_by_side(_each_head(matrix, heads))
            for matrix, heads in zip(layer.entering, counts, strict=True)
        ]

    @shown
    def contexts(self, t_nd: Tensor, layer: AttentionWeights) -> Tensor:
        """`softmax(Q Kᵀ / √(d/h) + M) V` of all heads at once, merged."""
        mixer = layer.config
        q_nc, k_nc, v_nc = self.queries_keys_values(t_nd, layer)
        q_hnk = self.split(q_nc, mixer.heads, layer.q_norm, mixer.qk_norm_wide)
        k_gnk = self.split(k_nc, mixer.kv_heads, layer.k_norm, mixer.qk_norm_wide)
        v_gne = self.split(v_nc, mixer.kv_heads, layer.v_norm)
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
    def split(
        self, x_nc: Tensor, heads: int, norm: NormWeights | None, together: bool = False
    ) -> Tensor:
        """`[n, h·d/h]` as `[h, n, d/h]`: two views; each head normalized, or all `together`."""
        if norm is not None and together:
            x_nc = self.norm(x_nc, norm)
        x_nhk = x_nc.view(*x_nc.shape[:-1], heads, -1)
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


def _each_head(matrix: Matrix, heads: int) -> list[Matrix]:
    """The columns of each head."""
    size = matrix.W.shape[1] // heads
    return [matrix.columns(head * size, (head + 1) * size) for head in range(heads)]
