"""Rung 2: one query at a time, `softmax(q Kᵀ / √(d/h)) V`.

Vectors are tensors now, and what was a loop over key tokens is one product of a row with a
matrix (a GEMV).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from llmcli.commands.ladder.measure import notation
from llmcli.commands.ladder.measure.elementwise import TENSORS, Function, soft_cap
from llmcli.commands.ladder.measure.notation import placed
from llmcli.commands.ladder.measure.rungs.loops import lowered
from llmcli.commands.ladder.measure.tensors import normalized, softmax
from llmcli.commands.ladder.measure.trace import Note, Show, silent
from llmcli.commands.ladder.measure.walk import HeadByHead
from llmcli.commands.ladder.measure.weights import AttentionWeights, Matrix, NormWeights
from llmcli.parts.attention.config import AttentionConfig

KeysValues = list[tuple[Tensor, Tensor]]  # of each key/value head, `[n, d/h]` and `[n, d_v]`


class VectorRows(HeadByHead[list[Tensor]]):
    """The forward pass token by token; each token's arithmetic is vectors times matrices."""

    number: ClassVar[int] = 2
    name: ClassVar[str] = "rows"
    title: ClassVar[str] = "one query at a time: its scores and its context are one product each"
    layer_note: ClassVar[str] = "Layer = Activation(x W + b)"

    @property
    def change(self) -> tuple[str, str]:
        """The loop over keys becomes a product of a row with a matrix."""
        q, K, V = (self.notation.placed(letter) for letter in "qKV")
        return (
            "for every t_k: k = t_k × W_k, score = q · k; for every t_v: c += a · v\n"
            "for every neuron: Activation(t · weights + bias)",
            "k_i = t_i W_k and v_i = t_i W_v once, stacked as the rows of K and V\n"
            f"for every t_q: c = softmax({self.notation.scaled(f'{q} {K}ᵀ')}) {V}\n"
            "Layer = Activation(x W + b): all neurons of one token at once",
        )

    @property
    def idea(self) -> str:
        """Keys and values once for each token."""
        return (
            "A key depends on its own token only, so it is computed once instead of for every "
            "query; the scores of one query are then the dot products of q with the rows of K, "
            "that is, with the columns of Kᵀ, and the weighted sum of the values is a product as "
            "well. The same multiplications and sums, but a product of a row with a matrix (GEMV) "
            "does d/h × n of them in one call, and the n² computations of keys and values are n. A "
            "neuron's weights are a column of W, so that x W is the sums of all of them. W is "
            "[in, out] here; checkpoints often store Wᵀ and write W @ x with x as a column."
        )

    # The rows of a prompt are a list of tensors `[d]`.

    def called(self, name: str) -> str:
        """A row's name: small letters, `k_i` and `v_i` where it is one of all keys or values."""
        return {"K": "k_i", "V": "v_i", "K_norm": "k_i_norm"}.get(name) or lowered(name)

    def stacked(self, X: list[Tensor]) -> Tensor:
        """`[n, …]`."""
        return torch.stack(X)

    def unstacked(self, X: Tensor) -> list[Tensor]:
        """Its rows, views."""
        return list(X)

    def rows_of(self, table: Tensor, indices: Tensor) -> list[Tensor]:
        """One after the other."""
        return [table[i] for i in indices.tolist()]

    def show_input(self, X: list[Tensor]) -> None:
        """That of the last token, which sees all the others."""
        made = notation.embedding_formula(self.config, "id", "position")
        self.show(f"x = {made}", X[-1], "d", token=len(X) - 1)

    def show_output(self, H: list[Tensor]) -> None:
        """That of the last token."""
        self.leave_blocks(H[-1], "d", name="H_q")

    def _show_row(self, formula: str, Y: list[Tensor], axes: str, note: Note = "") -> None:
        """The last row; of keys and values the first: all are in K and V, in the end."""
        i = 0 if formula.startswith(("k", "v")) else len(Y) - 1
        token = i if formula.startswith(("q", "k", "v")) else None
        self.show(formula, Y[i], axes, note=note, token=token)

    def each(
        self, formula: str, f: Function, *X: list[Tensor], axes: str = "d", note: Note = ""
    ) -> list[Tensor]:
        """Row by row."""
        Y = [f(*rows) for rows in zip(*X, strict=True)]
        if formula:
            self._show_row(formula, Y, axes, note)
        return Y

    def product(
        self, name: str, of: str, X: list[Tensor], W: Matrix, into: str, out: str, *,
        note: str = "",
    ) -> list[Tensor]:  # fmt: skip
        """Row by row, all neurons of a row at once: `x W + b` (GEMV)."""
        y, x = self.called(name), self.called(of)
        x = f"{x}_i" if y.endswith("_i") else x
        Y = [X_i @ W.W if W.b is None else X_i @ W.W + W.b for X_i in X]
        formula = f"{y} = {x} {W.name}{W.plus_bias}"
        self._show_row(formula, Y, f"({into})({into} × {out}) = {out}", note)
        return Y

    def norm(
        self, name: str, of: str, X: list[Tensor], norm: NormWeights, axes: str = "d"
    ) -> list[Tensor]:
        """Row by row."""
        y, x = self.called(name), self.called(of)
        shown = 0 if y[0] in "kv" else len(X) - 1
        return [
            normalized(y, x, row, norm, self.show if i == shown else silent, axes)
            for i, row in enumerate(X)
        ]

    def contexts(self, of: str, T: list[Tensor], layer: AttentionWeights) -> list[Tensor]:
        """Every head's contexts, concatenated token by token."""
        mixer = layer.config
        keys_values = self._stacked_rows(*self.keys_values(of, T, layer), mixer)
        group = mixer.heads // mixer.kv_heads  # heads that share keys and values
        contexts = []
        for head, queries in enumerate(self.queries(of, T, layer)):
            K, V = keys_values[head // group]
            sink = None if layer.sinks is None else layer.sinks[head]
            shows = [silent] * (len(T) - 1) + [self.show]
            contexts.append([
                attend(q, K, V, i, mixer, sink, show)
                for i, (q, show) in enumerate(zip(queries, shows, strict=True))
            ])  # fmt: skip
        formula, axes = "c = c¹ ⊕ … ⊕ cʰ, of the h heads", self.notation.C
        return self.each(formula, lambda *c: torch.cat(c), *contexts, axes=axes)

    def _stacked_rows(
        self, keys: list[list[Tensor]], values: list[list[Tensor]], mixer: AttentionConfig
    ) -> KeysValues:
        """The keys and values of all tokens in every key/value head, a row per token."""
        found, dv = [], self.notation.dv
        names = [(placed(big, mixer), placed(small, mixer)) for big, small in ("Kk", "Vv")]
        for K, V in zip(map(torch.stack, keys), map(torch.stack, values), strict=True):
            for (many, one), X, size in zip(names, (K, V), ("d/h", dv), strict=True):
                self.show(f"{many}: {one} of every token", X, f"n × {size}")
            found.append((K, V))
        return found


def attend(
    q: Tensor, K: Tensor, V: Tensor, i: int, mixer: AttentionConfig, sink: Tensor | None,
    show: Show,
) -> Tensor:  # fmt: skip
    """`softmax(q Kᵀ / √(d/h)) V` over the tokens that token i may see: the context `[d_v]`."""
    first = 0 if mixer.window is None else max(0, i + 1 - mixer.window)
    K, V = K[first : i + 1], V[first : i + 1]
    n = "n" if first == 0 else "W"
    k, dv = placed("K", mixer), "d/h" if mixer.value_dim == mixer.head_dim else "d_v"
    show(f"{k}ᵀ", K.t(), f"d/h × {n}", source=K)
    scores, s = q @ K.t() * mixer.scale, "s"
    formula = notation.scaled(f"{placed('q', mixer)} {k}ᵀ", mixer)
    show(f"s = {formula}", scores, f"(d/h)(d/h × {n}) = {n}", note=notation.scale(mixer))
    if mixer.cap is not None:
        scores, s = soft_cap(scores, mixer.cap, TENSORS), "s_cap"
        show(f"s_cap = {notation.capped('s', mixer)}", scores, n, note=f"cap = {mixer.cap:g}")
    weights = softmax(scores, sink)
    show(notation.softmax_formula("a", s, mixer), weights, n)
    context = weights @ V
    show(f"c = a {placed('V', mixer)}", context, f"({n})({n} × {dv}) = {dv}")
    return context
