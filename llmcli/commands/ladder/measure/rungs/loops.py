"""Rung 1: an LLM as concepts, loops over vectors and not one matrix.

A vector is a Python list. A weight matrix is the list of its columns: a column holds the weights
of one neuron. All in float64, whatever the model's dtype.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from llmcli.commands.ladder.measure import notation
from llmcli.commands.ladder.measure.elementwise import FLOATS, Function, Functions, soft_cap
from llmcli.commands.ladder.measure.notation import placed
from llmcli.commands.ladder.measure.trace import Note, Show, silent
from llmcli.commands.ladder.measure.walk import Walk
from llmcli.commands.ladder.measure.weights import (
    AttentionWeights,
    BlockWeights,
    Matrix,
    NormWeights,
    Weights,
)
from llmcli.parts.attention.config import AttentionConfig

Vector = list[float]
Vectors = list[Vector]
Neurons = tuple[Vectors, Vector | None]  # the weights of each neuron, and the biases


def lowered(name: str) -> str:
    """What a row of `name` is called: `t¹` of `T¹`, `H_q` of `H`, which would be no letter."""
    return {"H": "H_q", "H′": "H′_q"}.get(name, name.lower())


class Loops(Walk[Vectors]):
    """The forward pass token by token, head by head, neuron by neuron."""

    number: ClassVar[int] = 1
    name: ClassVar[str] = "loops"
    title: ClassVar[str] = "loops over vectors: every query token, every key token, every neuron"
    functions: ClassVar[Functions] = FLOATS
    layer_note: ClassVar[str] = ""
    up_note: ClassVar[str] = "a number for every neuron"

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self._converted: dict[int, Vectors] = {}

    @property
    def change(self) -> tuple[str, str]:
        """The nested loop."""
        of = self.notation
        rotated = [" and q_rot = R(position) q", " and k_rot = R(position) k"]
        q_rot, k_rot = rotated if of.rotates else ("", "")
        return (
            "an LLM as concepts: every token asks all tokens before it",
            f"""\
1      for every token t_q:
1.1      q = t_q × W_q{q_rot}
1.2      for every token t_k up to t_q:
1.2.1      k = t_k × W_k{k_rot}
1.2.2      score = {of.placed("q")} · {of.placed("k")}
1.3      a = softmax({of.scaled("score")}) over the scores of this t_q
1.4      for every token t_v up to t_q:
1.4.1      v = t_v × W_v
1.4.2      its part of the context: a · v
1.5      c = the sum of these parts
2      for every token, every neuron: Activation(t · weights + bias)""",
        )

    @property
    def idea(self) -> str:
        """What the loops do, and how often."""
        turned = ", rotated by their positions," if self.notation.rotates else ""
        return (
            f"Each token's query and every token's key{turned} are compared; the scores, scaled "
            "and through a softmax, say how much of each token's value goes into its context. Done "
            "literally, keys and values are computed again for every query and every head: n² "
            "vector-matrix products where n would do. The loop over t_k is usually written over "
            "all n tokens, and the later ones are masked; here it ends at the query's own token, "
            "which gives the same."
        )

    def prepare(self, until: int | None = None) -> None:
        """Turns tensors into lists ahead: the blocks up to `until`, or all of them and the head."""
        for block in self.weights.blocks[: None if until is None else until + 1]:
            for matrix in block.matrices:
                self._columns(matrix.W)
        if until is None:
            self._columns(self.weights.head.W)

    # The rows of a prompt are a list of lists.

    def called(self, name: str) -> str:
        """A row's name: small letters."""
        return lowered(name)

    def stacked(self, X: Vectors) -> Tensor:
        """`[n, …]` in float64."""
        return torch.tensor(X, dtype=torch.float64)

    def rows_of(self, table: Tensor, indices: Tensor) -> Vectors:
        """One after the other."""
        return [table[i].tolist() for i in indices.tolist()]

    def show_input(self, X: Vectors) -> None:
        """All of them."""
        made = notation.embedding_formula(self.config, "id", "position")
        self.show(f"X: x = {made} for every token", X, "n × d")

    def show_output(self, H: Vectors) -> None:
        """That of the last token."""
        self.leave_blocks(H[-1], "d", name="H_q")

    def block(self, block: BlockWeights, X: Vectors) -> Vectors:
        """Of the steps that every token takes, those of the last are shown."""
        self.show("x, the query token's row of X", X[-1], "d", token=len(X) - 1)
        H = super().block(block, X)
        self.show("H: H_q of every token", H, "n × d")
        return H

    def each(
        self, formula: str, f: Function, *X: Vectors, axes: str = "d", note: Note = ""
    ) -> Vectors:
        """Row by row, number by number."""
        Y = [[f(*numbers) for numbers in zip(*rows, strict=True)] for rows in zip(*X, strict=True)]
        if formula:
            self.show(formula, Y[-1], axes, note=note)
        return Y

    def product(
        self, name: str, of: str, X: Vectors, W: Matrix, into: str, out: str, *, note: str = ""
    ) -> Vectors:
        """Each neuron of each row: a dot product and its bias."""
        neurons = self._neurons(W)
        Y = [times(x, neurons) for x in X]
        formula = f"{self.called(name)} = {self.called(of)} × {W.name}{W.plus_bias}"
        self.show(formula, Y[-1], f"({into})({into} × {out}) = {out}", note=note)
        return Y

    def norm(self, name: str, of: str, X: Vectors, norm: NormWeights, axes: str = "d") -> Vectors:
        """Each row by itself."""
        y, x = self.called(name), self.called(of)
        return [normalized(y, x, row, norm, self._shows(i, X), axes) for i, row in enumerate(X)]

    def contexts(self, of: str, T: Vectors, layer: AttentionWeights) -> Vectors:
        """Every head's contexts, concatenated token by token."""
        contexts: Vectors = [[] for _ in T]
        for head in range(layer.config.heads):
            for i, context in enumerate(self._head(T, layer, head)):
                contexts[i] = contexts[i] + context
        self.show("c = c¹ ⊕ … ⊕ cʰ, of the h heads", contexts[-1], self.notation.C)
        return contexts

    def _head(self, T: Vectors, layer: AttentionWeights, head: int) -> Vectors:
        """The context vector of every token in one head: the documents' nested loop."""
        mixer = layer.config
        shared = head // (mixer.heads // mixer.kv_heads)  # heads may share keys and values
        q_name, k_name, v_name = (placed(letter, mixer) for letter in "qkv")
        contexts = []
        for i, t_q in enumerate(T):
            show = self._shows(i, T)
            q = self._query(t_q, i, layer, head, show)
            scores = []
            for j in seen(i, mixer):
                k = self._key(T[j], j, layer, shared, show)
                scores.append(dot(q, k))
            n = "n" if len(scores) == len(T) else "seen"
            show(f"score = {q_name} · {k_name}, for every t_k", scores, n)
            sink = None if layer.sinks is None else float(layer.sinks[head])
            weights = softmax(scores, mixer, sink, n, show)
            context = [0.0] * mixer.value_dim
            for j, weight in zip(seen(i, mixer), weights, strict=True):
                v = self._value(T[j], j, layer, shared, show)
                context = add_weighted(context, weight, v)
            show(f"c = Σ a · {v_name}, over every t_v", context, self.notation.dv)
            contexts.append(context)
        return contexts

    def _query(self, t: Vector, i: int, layer: AttentionWeights, head: int, show: Show) -> Vector:
        """The query of token i as it enters the scores."""
        growth = layer.config.growth
        wide = self.notation.wide_norms[0]
        q = self._head_of("q", t, i, layer.q, head, layer.q_norm, layer.config, wide, show)
        q = self._rotated("q", q, i, layer, show)
        if growth is not None:
            factor = 1 + growth.beta * math.log1p(i // growth.original)
            before = "q_rot" if layer.config.rope is not None else "q"
            q = [x * factor for x in q]
            show(notation.growth_formula("q_grown", before, layer.config), q, "d/h", token=i)
        return q

    def _key(self, t: Vector, j: int, layer: AttentionWeights, head: int, show: Show) -> Vector:
        """The key of token j as it enters the scores."""
        wide = self.notation.wide_norms[1]
        k = self._head_of("k", t, j, layer.k, head, layer.k_norm, layer.config, wide, show)
        return self._rotated("k", k, j, layer, show)

    def _value(self, t: Vector, j: int, layer: AttentionWeights, head: int, show: Show) -> Vector:
        """The value of token j."""
        axes = self.notation.dv
        return self._head_of("v", t, j, layer.v, head, layer.v_norm, layer.config, axes, show)

    def _head_of(
        self, name: str, t: Vector, i: int, W: Matrix, head: int, norm: NormWeights | None,
        config: AttentionConfig, axes: str, show: Show,
    ) -> Vector:  # fmt: skip
        """Token i's `t × W` in one head, normalized: by itself, or first with all other heads."""
        size = config.value_dim if name == "v" else config.head_dim
        together = config.qk_norm_wide and name != "v"
        cut = slice(head * size, (head + 1) * size)
        x = times(t, self._neurons(W, slice(None) if together else cut))
        formula = f"{name} = t_{name} × {W.name}{W.plus_bias}"
        show(formula, x, f"(d)(d × {axes}) = {axes}", token=i)
        if norm is not None:
            x = normalized(f"{name}_norm", name, x, norm, show, axes)
        return x[cut] if together else x

    def _rotated(
        self, name: str, x: Vector, position: int, layer: AttentionWeights, show: Show
    ) -> Vector:
        """A head's query or key rotated by its position, where the model does that."""
        config = layer.config
        if config.rope is None:
            return x
        per_position, factor = self.angles(config.rope)
        half = len(per_position)
        turned = list(x)  # beyond the rotated numbers it stays as it is
        for i, angle in enumerate(per_position.tolist()):
            cos, sin = math.cos(position * angle) * factor, math.sin(position * angle) * factor
            a, b = x[i], x[i + half]
            turned[i], turned[i + half] = a * cos - b * sin, b * cos + a * sin
        before = name if config.qk_norm is None else f"{name}_norm"
        show(f"{name}_rot = R(position) {before}", turned, "d/h", token=position)
        return turned

    def _neurons(self, W: Matrix, cut: slice = slice(None)) -> Neurons:
        """The columns of W and the biases, those of one head where `cut` says which."""
        return self._columns(W.W)[cut], None if W.b is None else W.b[cut].tolist()

    def _columns(self, W: Tensor) -> Vectors:
        """W as the list of its columns, converted the first time."""
        if id(W) not in self._converted:
            self._converted[id(W)] = W.double().t().tolist()
        return self._converted[id(W)]

    def _shows(self, i: int, tokens: Vectors) -> Show:
        """Of the steps that every token takes, those of the last one: it sees all the others."""
        return self.show if i == len(tokens) - 1 else silent


def dot(a: Vector, b: Vector) -> float:
    """`a · b`."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def times(t: Vector, neurons: Neurons) -> Vector:
    """`t × W + b`: neuron j is the dot product of t with column j, plus its bias."""
    columns, biases = neurons
    out = [dot(t, column) for column in columns]
    return out if biases is None else [x + b for x, b in zip(out, biases, strict=True)]


def add_weighted(total: Vector, weight: float, v: Vector) -> Vector:
    """`total + weight · v`."""
    return [c + weight * x for c, x in zip(total, v, strict=True)]


def seen(i: int, mixer: AttentionConfig) -> range:
    """The tokens that token i may see: those up to itself, or the last `window` of them."""
    return range(0 if mixer.window is None else max(0, i + 1 - mixer.window), i + 1)


def softmax(
    scores: Vector, mixer: AttentionConfig, sink: float | None, n: str, show: Show
) -> Vector:
    """Scaled and capped, then `exp(s) / Σ exp(s)`; a sink is one score more in that sum.

    The largest is subtracted so that nothing overflows.
    """
    scaled = [score * mixer.scale for score in scores]
    show(f"s = {notation.scaled('score', mixer)}", scaled, n, note=notation.scale(mixer))
    s = "s"
    if mixer.cap is not None:
        scaled, s = [soft_cap(score, mixer.cap, FLOATS) for score in scaled], "s_cap"
        show(f"s_cap = {notation.capped('s', mixer)}", scaled, n, note=f"cap = {mixer.cap:g}")
    every = scaled if sink is None else [*scaled, sink]
    largest = max(every)
    total = sum(math.exp(score - largest) for score in every)
    weights = [math.exp(score - largest) / total for score in scaled]
    show(notation.softmax_formula("a", s, mixer), weights, n)
    return weights


def normalized(y: str, x: str, row: Vector, norm: NormWeights, show: Show, axes: str) -> Vector:
    """`(x - mean) / √(variance + ε) · w + b`; RMSNorm: `x / √(mean(x²) + ε) · w`."""
    config = norm.config
    mean_formula, square_formula, formula = notation.norm_formulas(y, x, config)
    if config.kind == "layer":
        mean = sum(row) / len(row)
        show(mean_formula, mean)
        row = [a - mean for a in row]
    square = sum(a * a for a in row) / len(row)
    show(square_formula, square)
    root = math.sqrt(square + config.eps)
    row = [a / root for a in row]
    if norm.w is not None:
        row = [(config.offset + w) * a for w, a in zip(norm.w.tolist(), row, strict=True)]
    if norm.b is not None:
        row = [a + b for a, b in zip(row, norm.b.tolist(), strict=True)]
    show(formula, row, axes)
    return row
