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
from llmcli.commands.ladder.measure.tensors import growth, normalized, rotated, softmax
from llmcli.commands.ladder.measure.trace import Note, Show, silent
from llmcli.commands.ladder.measure.walk import Walk
from llmcli.commands.ladder.measure.weights import AttentionWeights, Matrix, NormWeights, Weights
from llmcli.parts.attention.config import AttentionConfig

KeysValues = list[tuple[Tensor, Tensor]]  # of each key/value head, `[n, d/h]` and `[n, d_v]`


class VectorRows(Walk[list[Tensor]]):
    """The forward pass token by token; each token's arithmetic is vectors times matrices."""

    number: ClassVar[int] = 2
    name: ClassVar[str] = "rows"
    title: ClassVar[str] = "one query at a time: its scores and its context are one product each"
    wide: ClassVar[str] = "d"
    layer_note: ClassVar[str] = "Layer = Activation(x W + b)"

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self._kept: dict[int, KeysValues] = {}  # keys and values, by their block

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
        """A row's name: small letters."""
        return lowered(name)

    def stacked(self, X: list[Tensor]) -> Tensor:
        """`[n, …]`."""
        return torch.stack(X)

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

    def each(
        self, formula: str, f: Function, *X: list[Tensor], axes: str = "d", note: Note = ""
    ) -> list[Tensor]:
        """Row by row."""
        Y = [f(*rows) for rows in zip(*X, strict=True)]
        if formula:
            self.show(formula, Y[-1], axes, note=note)
        return Y

    def product(
        self, name: str, of: str, X: list[Tensor], W: Matrix, into: str, out: str, *,
        note: str = "",
    ) -> list[Tensor]:  # fmt: skip
        """Row by row, all neurons of a row at once (GEMV)."""
        formula = f"{self.called(name)} = {self.called(of)} {W.name}{W.plus_bias}"
        Y = [times(x, W) for x in X]
        self.show(formula, Y[-1], f"({into})({into} × {out}) = {out}", note=note)
        return Y

    def norm(
        self, name: str, of: str, X: list[Tensor], norm: NormWeights, axes: str = ""
    ) -> list[Tensor]:
        """Row by row."""
        y, x = self.called(name), self.called(of)
        return [
            normalized(y, x, row, norm, self.show if i == len(X) - 1 else silent, axes or "d")
            for i, row in enumerate(X)
        ]

    def contexts(self, of: str, T: list[Tensor], layer: AttentionWeights) -> list[Tensor]:
        """Every head's contexts, concatenated token by token."""
        mixer, t = layer.config, self.called(of)
        if layer.keys_of == layer.block:
            self._kept[layer.block] = self._keys_values(t, T, layer)
        keys_values = self._kept[layer.keys_of]
        group = mixer.heads // mixer.kv_heads  # heads that share keys and values
        C = []
        for i, row in enumerate(T):
            show = self.show if i == len(T) - 1 else silent
            queries = self._queries(t, row, i, layer, show)
            contexts = []
            for head, q in enumerate(queries):
                sink = None if layer.sinks is None else layer.sinks[head]
                contexts.append(attend(q, *keys_values[head // group], i, mixer, sink, show))
            C.append(torch.cat(contexts))
            show("c = c¹ ⊕ … ⊕ cʰ, of the h heads", C[-1], self.notation.C)
        return C

    def _queries(
        self, of: str, t: Tensor, i: int, layer: AttentionWeights, show: Show
    ) -> list[Tensor]:
        """The queries of token i in every head, as they enter the scores."""
        mixer, (wide, _) = layer.config, self.notation.wide_norms
        queries = self._heads("q", of, t, i, layer.q, mixer.heads, show)
        queries = self._normed("q", queries, layer.q_norm, mixer.qk_norm_wide, wide, show)
        before = "q" if layer.q_norm is None else "q_norm"
        queries = [self._rotated(before, q, i, mixer, show) for q in queries]
        if mixer.growth is not None:
            before = before if mixer.rope is None else "q_rot"
            formula = notation.growth_formula("q_grown", before, mixer)
            at = torch.tensor(i)
            factor = growth(mixer.growth.beta, mixer.growth.original, at, queries[0])
            queries = [q * factor for q in queries]
            show(formula, queries[0], "d/h", token=i)
        return queries

    def _keys_values(self, of: str, T: list[Tensor], layer: AttentionWeights) -> KeysValues:
        """The keys and values of all tokens in every key/value head, a row per token."""
        assert layer.k is not None
        mixer, (_, wide), dv = layer.config, self.notation.wide_norms, self.notation.dv
        rows = []
        for i, t in enumerate(T):
            show = self.show if i == 0 else silent  # all are in K and V, in the end
            raw = self._heads("k_i", f"{of}_i", t, i, layer.k, mixer.kv_heads, show)
            keys = self._normed("k_i", raw, layer.k_norm, mixer.qk_norm_wide, wide, show)
            before = "k_i" if layer.k_norm is None else "k_i_norm"
            keys = [self._rotated(before, k, i, mixer, show) for k in keys]
            if layer.v is not None:
                raw = self._heads("v_i", f"{of}_i", t, i, layer.v, mixer.kv_heads, show, dv)
            else:
                show("v_i = k_i: values are what keys are at first", raw[0], dv, token=i)
            values = self._normed("v_i", raw, layer.v_norm, False, dv, show)
            rows.append((keys, values))
        found = []
        for head in range(mixer.kv_heads):
            K, V = (torch.stack([row[which][head] for row in rows]) for which in (0, 1))
            self.show(f"{placed('K', mixer)}: {placed('k', mixer)} of every token", K, "n × d/h")
            self.show(f"{placed('V', mixer)}: {placed('v', mixer)} of every token", V, f"n × {dv}")
            found.append((K, V))
        return found

    def _heads(
        self, name: str, of: str, t: Tensor, i: int, W: Matrix, heads: int, show: Show,
        axes: str = "d/h",
    ) -> list[Tensor]:  # fmt: skip
        """Token i's `t W` in every head: its W is so many columns of the stored one, a view."""
        size, formula = W.W.shape[1] // heads, f"{name} = {of} {W.name}{W.plus_bias}"
        found = [times(t, W.columns(h * size, (h + 1) * size)) for h in range(heads)]
        show(formula, found[0], f"(d)(d × {axes}) = {axes}", token=i)
        return found

    def _normed(
        self, name: str, X: list[Tensor], norm: NormWeights | None, together: bool, axes: str,
        show: Show,
    ) -> list[Tensor]:  # fmt: skip
        """Each head's numbers normalized by themselves, or those of all heads together."""
        if norm is None:
            return X
        y = f"{name}_norm"
        if together:
            whole = normalized(y, name, torch.cat(X), norm, show, axes)
            return list(whole.chunk(len(X)))
        return [normalized(y, name, x, norm, show, axes) for x in X]

    def _rotated(
        self, name: str, x: Tensor, position: int, mixer: AttentionConfig, show: Show
    ) -> Tensor:
        """A query or key rotated by its position, where the model does that."""
        if mixer.rope is None:
            return x
        cos, sin = self.turns(mixer.rope)
        x = rotated(x, cos[position], sin[position])
        show(f"{name[0]}_rot = R(position) {name}", x, "d/h", token=position)
        return x


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


def times(t: Tensor, W: Matrix) -> Tensor:
    """`t W + b`: a row times a matrix, and the bias where there is one."""
    y = t @ W.W
    return y if W.b is None else y + W.b
