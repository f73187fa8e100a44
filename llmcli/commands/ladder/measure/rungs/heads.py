"""Rung 4: the heads are a dimension, `n × d` seen as `n × h × d/h` seen as `h × n × d/h`.

The weights of all heads lie side by side in one matrix, made when the model is built, and the
loop over the heads is gone.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from llmcli.commands.ladder.measure import notation
from llmcli.commands.ladder.measure.notation import placed
from llmcli.commands.ladder.measure.rungs.matrices import Matrices
from llmcli.commands.ladder.measure.trace import Show, silent
from llmcli.commands.ladder.measure.weights import (
    AttentionWeights,
    Matrix,
    NormWeights,
    Weights,
    side_by_side,
)
from llmcli.parts.attention.config import AttentionConfig


class HeadsAsDimension(Matrices):
    """The forward pass on tensors with an axis of heads."""

    number: ClassVar[int] = 4
    name: ClassVar[str] = "heads"
    title: ClassVar[str] = "heads are a dimension: all of them in one batched product"
    h: ClassVar[str] = "h × "
    softmax_note: ClassVar[str] = ""

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self.entering = {layer.block: self.own_matrices(layer) for layer in weights.attentions}

    @property
    def change(self) -> tuple[str, str]:
        """The loop over heads becomes an axis."""
        of = self.notation
        Q, K, V = (of.placed(letter) for letter in "QKV")
        return (
            f"for every head: Q = {of.T} W_q …; softmax({of.scaled(f'{Q} {K}ᵀ')} + M) {V}",
            f"Q = {of.T} (W_q¹ ⊕ … ⊕ W_qʰ), K and V alike{of.rotation}\n"
            "n × d → n × h × d/h → h × n × d/h: two views\n"
            f"softmax({of.scaled(f'{Q} {K}ᵀ')} + M) {V} for all heads in one call",
        )

    @property
    def idea(self) -> str:
        """Products work column by column; views move nothing."""
        shared = (
            " Several heads share a key and a value: a batched product wants a pair of matrices "
            "for every head, so both are repeated h/h_kv times, a copy that rung 8 does without."
        )
        return (
            "A product works column by column, so weights concatenated by columns give the heads' "
            "queries side by side: one product instead of h. Seeing n × d as n × h × d/h and that "
            "as h × n × d/h moves no number, only the strides change; a library loops over the "
            "leading dimension by itself. Merging the heads back does move them: a row of n × d "
            "wants numbers of every head side by side, which h × n × d/h has far apart, so that is "
            "a copy. One head's output is n × d/h, neither n × n/h nor n × d, as it is sometimes "
            "given." + (shared if self.notation.shared else "")
        )

    def own_matrices(self, layer: AttentionWeights) -> list[Matrix]:
        """W_q, W_k and W_v: the weights of the single heads put side by side, copies."""
        mixer = layer.config
        counts = (mixer.heads, mixer.kv_heads, mixer.kv_heads)
        return [
            side_by_side(matrix.name, _each_head(matrix, heads))
            for matrix, heads in zip(layer.entering, counts, strict=True)
        ]

    def contexts(self, of: str, T: Tensor, layer: AttentionWeights) -> Tensor:
        """`softmax(Q Kᵀ / √(d/h) + M) V` of all heads at once, merged."""
        mixer, notation_ = layer.config, self.notation
        h_kv, (q_wide, k_wide), dv = notation_.h_kv, notation_.wide_norms, notation_.dv
        Q, K, V = self.queries_keys_values(of, T, layer)
        heads = f"{self.b}h × {self.n} × d/h"
        Q = self._split_normed("Q", Q, mixer.heads, "h", layer.q_norm, mixer.qk_norm_wide, q_wide)
        Q = self.placed("Q", Q, mixer, heads)
        together, k_norm = mixer.qk_norm_wide, layer.k_norm
        K = self._split_normed("K", K, mixer.kv_heads, h_kv, k_norm, together, k_wide)
        V = self._split_normed("V", V, mixer.kv_heads, h_kv, layer.v_norm, False, dv)
        K = self.placed("K", K, mixer, f"{self.b}{h_kv} × {self.n} × d/h")
        K, V = self.with_kept(K, V, layer)
        if mixer.kv_heads < mixer.heads:
            K, V = self._repeated(K, V, mixer)
        sinks = None if layer.sinks is None else layer.sinks[:, None, None]
        return self._merge(self.attend(Q, K, V, self.mask(mixer), mixer, sinks))

    def queries_keys_values(self, of: str, T: Tensor, layer: AttentionWeights) -> list[Tensor]:
        """Q, K and V of all heads side by side."""
        matrices = self.entering[layer.block]
        formula = "W_q = W_q¹ ⊕ … ⊕ W_qʰ, as the model is built"
        self.show(formula, matrices[0].W, f"d × {self.notation.Q}", source=layer.q.W)
        axes = (self.notation.Q, self.notation.K, self.notation.V)
        return [
            self.product(matrix.name[-1].upper(), of, T, matrix, "d", out)
            for matrix, out in zip(matrices, axes, strict=True)
        ]

    def with_kept(self, K: Tensor, V: Tensor, layer: AttentionWeights) -> tuple[Tensor, Tensor]:
        """The keys and values that a block reads, `[h_kv, n, …]`: here those of its rows."""
        return K, V

    def _split_normed(
        self, name: str, X: Tensor, heads: int, h: str, norm: NormWeights | None, together: bool,
        axes: str,
    ) -> Tensor:  # fmt: skip
        """`[n, h·d/h]` as `[h, n, d/h]`: normalized head by head, or all heads before the split."""
        if norm is not None and together:
            X = self.norm(f"{name}_norm", name, X, norm, axes)
            return self._split(f"{name}_norm", X, heads, h)
        X = self._split(name, X, heads, h)
        if norm is None:
            return X
        return self.norm(f"{name}_norm", name, X, norm, f"{self.b}{h} × {self.n} × {axes}")

    def _split(self, name: str, X: Tensor, heads: int, h: str = "h") -> Tensor:
        """`[n, h·d/h]` seen as `[n, h, d/h]`, and that as `[h, n, d/h]`: two views."""
        called, size = self.called(name), self.notation.dv if name[0] == "V" else "d/h"
        apart, axes = X.view(*X.shape[:-1], heads, -1), f"{self.b}{self.n} × {h} × {size}"
        self.show(f"{called} as {axes}", apart, axes, source=X)
        turned, axes = apart.transpose(-3, -2), f"{self.b}{h} × {self.n} × {size}"
        self.show(f"{called} as {axes}", turned, axes, source=apart)
        return turned

    def _repeated(self, K: Tensor, V: Tensor, mixer: AttentionConfig) -> tuple[Tensor, Tensor]:
        """K and V once for every head that reads them, `[h, n, d/h]`: copies."""
        times, found = mixer.heads // mixer.kv_heads, []
        for letter, X, size in (("K", K, "d/h"), ("V", V, self.notation.dv)):
            many, axes = X.repeat_interleave(times, -3), f"{self.h}{self.keys} × {size}"
            formula = f"{placed(letter, mixer)} as {axes}, for every head"
            self.show(formula, many, axes, source=X)
            found.append(many)
        return found[0], found[1]

    def _merge(self, C: Tensor) -> Tensor:
        """`[h, n, d/h]` back to `[n, h·d/h]`: the transpose is a view, the rows must be copied."""
        called, size = self.called("C"), self.notation.dv
        turned, axes = C.transpose(-3, -2), f"{self.b}{self.n} × h × {size}"
        self.show(f"{called} as {axes}", turned, axes, source=C)
        merged, axes = turned.flatten(-2), self.rows(self.notation.C)
        self.show(f"{called} as {axes}, heads merged", merged, axes, source=turned)
        return merged

    def transpose_note(self, q: str, k: str) -> str:
        """Said on the rung below."""
        return ""

    def score_note(self, Q: Tensor, K: Tensor, S: Tensor, mixer: AttentionConfig) -> str:
        """The scale's value."""
        return notation.scale(mixer)


def _each_head(matrix: Matrix, heads: int) -> list[Matrix]:
    """The columns of each head."""
    size = matrix.W.shape[1] // heads
    return [matrix.columns(head * size, (head + 1) * size) for head in range(heads)]
