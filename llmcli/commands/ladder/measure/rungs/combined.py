"""Rung 5: one matrix for queries, keys and values, `Q K V = T W_qkv` split in three views."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.rungs.heads import HeadsAsDimension
from llmcli.commands.ladder.measure.weights import AttentionWeights, Matrix, side_by_side


class CombinedQKV(HeadsAsDimension):
    """The forward pass with one product for the queries, keys and values of all heads."""

    number: ClassVar[int] = 5
    name: ClassVar[str] = "combined"

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
