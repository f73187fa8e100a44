"""Rung 3: vectors of vectors become matrices, `softmax(Q Kᵀ / √(d/h) + M) V`, head by head.

The n vectors of the prompt are the rows of one matrix, and the loops over tokens are gone.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from llmcli.commands.ladder.measure import notation
from llmcli.commands.ladder.measure.elementwise import TENSORS, Function, soft_cap
from llmcli.commands.ladder.measure.notation import placed
from llmcli.commands.ladder.measure.tensors import mask, normalized, softmax
from llmcli.commands.ladder.measure.trace import Note, Show, silent
from llmcli.commands.ladder.measure.walk import HeadByHead
from llmcli.commands.ladder.measure.weights import AttentionWeights, Matrix, NormWeights, Weights
from llmcli.parts.attention.config import AttentionConfig


class Matrices(HeadByHead[Tensor]):
    """The forward pass on `[n, d]` matrices, with a loop over the heads.

    Letters of axes, which the rungs above change: `b` those before the rows, `h` before a head's
    rows, `n` the rows and `keys` the rows of keys.
    """

    number: ClassVar[int] = 3
    name: ClassVar[str] = "matrices"
    title: ClassVar[str] = "vectors of vectors become matrices, one head at a time"
    b: ClassVar[str] = ""
    h: ClassVar[str] = ""

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self.n = self.keys = "n"

    @property
    def change(self) -> tuple[str, str]:
        """The loops over tokens become products of matrices."""
        of = self.notation
        q, Q, K, V = (of.placed(letter) for letter in "qQKV")
        T, attention = of.T, f"Attention({Q}, {K}, {V}) = softmax({of.scaled(f'{Q} {K}ᵀ')} + M) {V}"
        return (
            f"for every t_q: c = softmax({of.scaled(f'{q} {K}ᵀ')}) {V}\n"
            "for every token: Layer = Activation(x W + b)",
            f"Q = {T} W_q, K = {T} W_k, V = {T} W_v{of.rotation}\n{attention}\n"
            f"Layer = Activation(X W + B) for all tokens at once, {of.F} neurons",
        )

    @property
    def idea(self) -> str:
        """n products of a row are one of matrices."""
        return (
            "Row i of a product X W is x_i W, so the n products of a row are one product of "
            "matrices (GEMM), which reads W once instead of n times; row i of B is b, for every i. "
            "A product takes columns on its right, and the keys are the rows of K: hence Kᵀ, a "
            "view that moves nothing. Now every query meets every key, and the mask M (−∞ above "
            "the diagonal) hides the later tokens before the softmax; the half of Q Kᵀ that it "
            "hides is computed in vain and still cheaper than a loop. The formula is often written "
            "without the mask, and even without the transpose; it needs both. The activation "
            "follows the hidden layer only."
        )

    # The rows of a prompt are a matrix.

    def rows(self, axes: str) -> str:
        """Axes of rows that are `axes` wide; all of them where that is more than one letter."""
        return axes if " × " in axes else f"{self.b}{self.n} × {axes}"

    def stacked(self, X: Tensor) -> Tensor:
        """The same."""
        return X

    def unstacked(self, X: Tensor) -> Tensor:
        """The same."""
        return X

    def rows_of(self, table: Tensor, indices: Tensor) -> Tensor:
        """All at once."""
        return table[indices]

    def show_input(self, X: Tensor) -> None:
        """The matrix."""
        made = notation.embedding_formula(self.config, "ids", "positions")
        self.show(f"{self.called('X')} = {made}", X, self.rows("d"))

    def show_output(self, H: Tensor) -> None:
        """The matrix."""
        self.leave_blocks(H, self.rows("d"), self.row)

    def each(
        self, formula: str, f: Function, *X: Tensor, axes: str = "d", note: Note = ""
    ) -> Tensor:
        """All numbers at once."""
        Y: Tensor = f(*X)
        if formula:
            self.show(formula, Y, self.rows(axes), note=note)
        return Y

    def product(
        self, name: str, of: str, X: Tensor, W: Matrix, into: str, out: str, *, note: str = ""
    ) -> Tensor:
        """All rows at once (GEMM), b added to every row where there is one."""
        Y = X @ W.W
        if W.b is not None:
            Y = Y + W.b
        formula = f"{self.called(name)} = {self.called(of)} {W.name}{W.plus_bias}"
        axes = f"({self.rows(into)})({into} × {out}) = {self.rows(out)}"
        self.show(formula, Y, axes, note=note)
        return Y

    def norm(self, name: str, of: str, X: Tensor, norm: NormWeights, axes: str = "d") -> Tensor:
        """All rows at once."""
        y, x = self.called(name), self.called(of)
        return normalized(y, x, X, norm, self.show, self.rows(axes))

    # Attention.

    def contexts(self, of: str, T: Tensor, layer: AttentionWeights) -> Tensor:
        """Every head's context matrix, side by side."""
        mixer = layer.config
        queries = self.queries(of, T, layer)
        keys, values = self.keys_values(of, T, layer)
        group, M = mixer.heads // mixer.kv_heads, self.mask(mixer)  # heads that share keys
        contexts = []
        for head, Q in enumerate(queries):
            sink = None if layer.sinks is None else layer.sinks[head]
            K, V = keys[head // group], values[head // group]
            contexts.append(self.attend(Q, K, V, M, mixer, sink))
        C = torch.cat(contexts, 1)
        self.show("C = C¹ ⊕ … ⊕ Cʰ, of the h heads", C, f"n × {self.notation.C}")
        return C

    def attend(
        self, Q: Tensor, K: Tensor, V: Tensor, M: Tensor | None, mixer: AttentionConfig,
        sink: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """`softmax(Q Kᵀ / √(d/h) + M) V`, `[…, n, d_v]`."""
        h, n, s, dv = self.h, self.n, self.keys, self.notation.dv
        q, k, v = self.called(placed("Q", mixer)), placed("K", mixer), placed("V", mixer)
        S_, A_, C_ = map(self.called, "SAC")
        KT = K.transpose(-2, -1)
        self.show(f"{k}ᵀ", KT, f"{h}d/h × {s}", source=K, note=self.transpose_note(q, k))
        S = Q @ KT * mixer.scale
        product = f"{h}({n} × d/h)(d/h × {s}) = {h}{n} × {s}"
        formula = f"{S_} = {notation.scaled(f'{q} {k}ᵀ', mixer)}"
        self.show(formula, S, product, note=lambda: self.score_note(Q, K, S, mixer))
        square = f"{h}{n} × {s}"
        if mixer.cap is not None:
            S = soft_cap(S, mixer.cap, TENSORS)
            formula = f"{self.called('S_cap')} = {notation.capped(S_, mixer)}"
            S_ = self.called("S_cap")
            self.show(formula, S, square, note=f"cap = {mixer.cap:g}")
        if M is not None:
            self.show("M, the mask", M, "n × n")
            S, S_ = S + M, f"{S_} + M"
            self.show(S_, S, square)
        A = softmax(S, sink)
        formula = notation.softmax_formula(A_, S_, mixer)
        self.show(formula, A, square, note=self.softmax_note)
        C = A @ V
        self.show(f"{C_} = {A_} {v}", C, f"{h}({n} × {s})({s} × {dv}) = {h}{n} × {dv}")
        return C

    def mask(self, mixer: AttentionConfig) -> Tensor | None:
        """M, which hides the later tokens and those before the window."""
        return mask(self.count, mixer.window).to(self.weights.W_E)

    softmax_note: ClassVar[str] = "row by row: each sums to 1"

    def transpose_note(self, q: str, k: str) -> str:
        """Why keys are transposed."""
        return f"{q} {k} is not defined: n × d/h times n × d/h"

    def score_note(self, Q: Tensor, K: Tensor, S: Tensor, mixer: AttentionConfig) -> str:
        """The score of the last query and the first key, spelled out, and the scale's value."""
        i = len(Q) - 1
        terms = " + ".join(f"({a:.3g})({b:.3g})" for a, b in zip(Q[i, :2], K[0, :2], strict=True))
        usual = notation.usual(mixer)
        root = f"/ {mixer.scale**-1:.4g}" if usual else f"· {mixer.scale:.4g}"
        rows = f"({placed('Q', mixer)} row {i} · {placed('K', mixer)} row 0) {root}"
        spelled = f"{notation.scale(mixer)}\nS[{i},0] = {rows}"
        return f"{spelled}\n= ({terms} + …) {root} = {S[i, 0]:.4g}"
