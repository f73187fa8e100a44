"""Rung 5: one matrix for queries, keys and values, `Q K V = T W_qkv` split in three views."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from llmcli.commands.ladder.measure.rungs.heads import HeadsAsDimension
from llmcli.commands.ladder.measure.weights import AttentionWeights, Matrix, side_by_side


class CombinedQKV(HeadsAsDimension):
    """The forward pass with one product for the queries, keys and values of all heads."""

    number: ClassVar[int] = 5
    name: ClassVar[str] = "combined"
    title: ClassVar[str] = "combined QKV: one product instead of three"

    @property
    def change(self) -> tuple[str, str]:
        """Three products become one."""
        T = self.notation.T
        return (
            f"Q = {T} W_q, K = {T} W_k, V = {T} W_v",
            f"W_qkv = W_q ⊕ W_k ⊕ W_v, as the model is built\nQ, K, V = split({T} W_qkv)",
        )

    @property
    def idea(self) -> str:
        """The same columns in one matrix."""
        narrow = " Here heads share keys and values: K and V are narrower than Q."
        return (
            "The same columns side by side in one matrix give the same numbers side by side in one "
            "product, and the three slices of it are views: Q, K and V. Nothing is saved in "
            "arithmetic: what two calls less save is their fixed cost, and one wide product fills "
            "a machine better than three narrow ones." + (narrow if self.notation.shared else "")
        )

    def own_matrices(self, layer: AttentionWeights) -> list[Matrix]:
        """W_qkv alone."""
        return [side_by_side("W_qkv", layer.entering)]

    def queries_keys_values(self, of: str, T: Tensor, layer: AttentionWeights) -> list[Tensor]:
        """Q, K and V, views of one product."""
        (W,) = self.entering[layer.block]
        names = [matrix.name for matrix in layer.entering]
        axes = self.notation.QKV
        if not self.row:
            self.show(f"{W.name} = {' ⊕ '.join(names)}, as the model is built", W.W, f"d × {axes}")
        whole = self.product("QKV", of, T, W, "d", axes)
        parts = whole.split_with_sizes([matrix.W.shape[1] for matrix in layer.entering], -1)
        columns = (self.notation.Q, self.notation.K, self.notation.V)
        places = ("first", "next", "last")
        for letter, place, part, out in zip("QKV", places, parts, columns, strict=True):
            formula = f"{self.called(letter)}, the {place} columns"
            self.show(formula, part, self.rows(out), source=whole)
        return list(parts)
