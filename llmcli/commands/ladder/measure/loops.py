"""Rung 1: loops over vectors and not one matrix.

A vector is a Python list. A weight matrix is the list of its columns: a column holds the weights
of one neuron. All in float64, for every dtype of the model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.record import shown, shown_last
from llmcli.commands.ladder.measure.walk import Function, Walk, soft_cap
from llmcli.commands.ladder.measure.weights import (
    AttentionWeights,
    Matrix,
    NormWeights,
    Projection,
    Weights,
)
from llmcli.config.attention import AttentionConfig, ScoreConfig, first_key
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import ModelConfig
from llmcli.config.norm import JoinedNorm

Vector = list[float]
Vectors = list[Vector]
Neurons = tuple[Vectors, Vector | None]  # the weights of each neuron, and the biases


class Loops(Walk):
    """The forward pass token by token, head by head, neuron by neuron."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._converted: dict[int, Vectors] = {}

    def prepare(self, until: int | None = None) -> None:
        """Turns tensors into lists: the blocks up to `until`, or all of them and the head.

        Without it `forward` converts what it needs, which is no part of the arithmetic to be timed.
        """
        for block in self.weights.blocks[: None if until is None else until + 1]:
            for matrix in block.matrices:
                self._columns(matrix.W)
        if until is None:
            self._columns(self.weights.head.W)

    # The rows of a prompt are a list of lists.

    def stacked(self, x_ni: Vectors) -> Tensor:
        """`[n, …]` in float64."""
        return torch.tensor(x_ni, dtype=torch.float64)

    def unstacked(self, x_ni: Tensor) -> Vectors:
        """Its rows as lists."""
        rows: Vectors = x_ni.tolist()
        return rows

    def each(self, f: Function, *x_ni: Vectors) -> Vectors:
        """Row by row, number by number."""
        return [
            [f(*numbers) for numbers in zip(*rows, strict=True)] for rows in zip(*x_ni, strict=True)
        ]

    def product(self, x_ni: Vectors, matrix: Matrix) -> Vectors:
        """Each neuron of each row: a dot product and its bias."""
        neurons = self._neurons(matrix)
        return [times(x_i, neurons) for x_i in x_ni]

    def norm(self, x_ni: Vectors, norm: NormWeights) -> Vectors:
        """Each row by itself."""
        return [normalized(x_i, norm) for x_i in x_ni]

    @shown
    def contexts(self, t_nd: Vectors, layer: AttentionWeights) -> Vectors:
        """Every head's contexts, concatenated token by token: c = c¹ ⊕ … ⊕ cʰ."""
        c_nc: Vectors = [[] for _ in t_nd]
        for head in range(layer.config.heads):
            for i, c_e in enumerate(self.attend(t_nd, layer, head)):
                c_nc[i] = c_nc[i] + c_e
        return c_nc

    @shown
    def attend(self, t_nd: Vectors, layer: AttentionWeights, head: int) -> Vectors:
        """The context vector of every token in one head: the documents' nested loop."""
        mixer, c_ne = layer.config, []
        sink = None if layer.sinks is None else float(layer.sinks[head])
        shared = head // (mixer.heads // mixer.kv_heads)  # heads may share keys and values
        for i, t_q_d in enumerate(t_nd):
            q_k = self.query(t_q_d, i, layer, head)  # q = t_q × W_q
            s_m = []
            for j in seen(i, mixer.scores):
                k_k = self.key(t_nd[j], j, layer, shared)  # k = t_k × W_k
                score = dot(q_k, k_k)  # score = q · k
                s_m.append(score)
            a_m = softmax(s_m, mixer.scores, sink)  # a = softmax(score / √(d/h))
            c_e = [0.0] * mixer.value_dim
            for j, a in zip(seen(i, mixer.scores), a_m, strict=True):
                v_e = self.head_of(t_nd[j], layer.v, shared)  # v = t_v × W_v
                c_e = add_weighted(c_e, a, v_e)  # c = Σ a · v
            c_ne.append(c_e)
        return c_ne

    def query(self, t_d: Vector, i: int, layer: AttentionWeights, head: int) -> Vector:
        """The query of token i as it enters the scores."""
        growth = layer.config.scores.growth
        q_k = self._rotated(self.head_of(t_d, layer.q, head), i, layer.config)
        factor = 1.0 if growth is None else growth.at(i)
        return [x * factor for x in q_k]

    def key(self, t_d: Vector, j: int, layer: AttentionWeights, head: int) -> Vector:
        """The key of token j as it enters the scores."""
        return self._rotated(self.head_of(t_d, layer.k, head), j, layer.config)

    def head_of(self, t_d: Vector, W: Projection, head: int) -> Vector:
        """A token's `t × W` in one head, normalized: by itself, or first with all other heads."""
        size = W.W.shape[1] // W.heads
        cut = slice(head * size, (head + 1) * size)
        x_k = times(t_d, self._neurons(W, slice(None) if W.together else cut))
        if W.norm is not None:
            x_k = normalized(x_k, W.norm)
        return x_k[cut] if W.together else x_k

    def _rotated(self, x_k: Vector, position: int, config: AttentionConfig) -> Vector:
        """R(position) x: a head's query or key rotated by its position, if the model rotates."""
        return x_k if config.rope is None else rotated(x_k, position, *self.angles(config.rope))

    def _neurons(self, W: Matrix, cut: slice = slice(None)) -> Neurons:
        """The columns of W and the biases, those of one head where `cut` says which."""
        return self._columns(W.W)[cut], None if W.b is None else W.b[cut].tolist()

    def _columns(self, W: Tensor) -> Vectors:
        """W as the list of its columns, converted the first time."""
        if id(W) not in self._converted:
            self._converted[id(W)] = W.double().t().tolist()
        return self._converted[id(W)]


def dot(a: Vector, b: Vector) -> float:
    """`a · b`."""
    return sum(x * y for x, y in zip(a, b, strict=True))


@shown
def times(t_i: Vector, neurons: Neurons) -> Vector:
    """`t × W + b`: neuron j is the dot product of t with column j, plus its bias."""
    columns, biases = neurons
    y_j = [dot(t_i, column) for column in columns]
    if biases is not None:
        y_j = [x + b for x, b in zip(y_j, biases, strict=True)]
    return y_j


def add_weighted(total: Vector, weight: float, v: Vector) -> Vector:
    """`total + weight · v`."""
    return [c + weight * x for c, x in zip(total, v, strict=True)]


def seen(i: int, scores: ScoreConfig) -> range:
    """The tokens that token i may see: those up to itself, or the last `window` of them."""
    return range(0 if scores.window is None else max(0, first_key(i, scores.window)), i + 1)


@shown
def rotated(x_k: Vector, position: int, per_position: Tensor, factor: float) -> Vector:
    """R(position) x: number i and number i + half of a head turned by their angle, in radians."""
    half, y_k = len(per_position), list(x_k)  # beyond the rotated numbers it stays as it is
    for i, angle in enumerate(per_position.tolist()):
        cos, sin = math.cos(position * angle) * factor, math.sin(position * angle) * factor
        a, b = x_k[i], x_k[i + half]
        y_k[i], y_k[i + half] = a * cos - b * sin, b * cos + a * sin
    return y_k


@shown_last
def softmax(s_m: Vector, scores: ScoreConfig, sink: float | None) -> Vector:
    """Scaled and capped, then `exp(s) / Σ exp(s)`; a sink is one score more in that sum.

    The largest is subtracted so that nothing overflows.
    """
    s_m = [score * scores.scale for score in s_m]  # s = score / √(d/h)
    if scores.cap is not None:
        s_m = [soft_cap(score, scores.cap) for score in s_m]  # cap · tanh(s / cap)
    every = s_m if sink is None else [*s_m, sink]
    largest = max(every)
    total = sum(math.exp(score - largest) for score in every)
    a_m = [math.exp(score - largest) / total for score in s_m]
    return a_m


@shown_last
def normalized(x_i: Vector, norm: NormWeights) -> Vector:
    """LayerNorm `(x − μ)/√(σ² + ε) · w + b`; RMSNorm `x/√(mean(x²) + ε) · w`."""
    config = norm.config
    if config.kind == "layer":
        mean = sum(x_i) / len(x_i)  # μ
        x_i = [a - mean for a in x_i]
    square = sum(a * a for a in x_i) / len(x_i)  # σ², or mean(x²)
    y_i = [a / math.sqrt(square + config.eps) for a in x_i]
    if norm.w is not None:
        y_i = [(config.offset + w) * a for w, a in zip(norm.w.tolist(), y_i, strict=True)]
    if norm.b is not None:
        y_i = [a + b for a, b in zip(y_i, norm.b.tolist(), strict=True)]
    return y_i


def multiply_adds(config: ModelConfig, tokens: int, until: int | None = None) -> int:
    """Multiply-adds of the dot products and weighted sums of `Loops.forward` on that many tokens.

    With `until`, only of the blocks up to it, without the head. Other operations are not counted.
    """
    width, count = config.width, 0
    for layer in config.layers[: None if until is None else until + 1]:
        for part in layer.parts:
            match part:
                case AttentionConfig():
                    count += _attention_adds(part, width, tokens)
                case MlpConfig():
                    count += tokens * width * part.hidden * (3 if part.gated else 2)
    return count if until is not None else count + tokens * width * config.vocab


def _attention_adds(mixer: AttentionConfig, width: int, tokens: int) -> int:
    pairs = sum(len(seen(i, mixer.scores)) for i in range(tokens))
    together = isinstance(mixer.qk_norm, JoinedNorm)  # a head's query needs the queries of all
    q, k = (mixer.head_dim * (n if together else 1) for n in (mixer.heads, mixer.kv_heads))
    head = tokens * width * q  # t_q × W_q
    head += pairs * (width * k + mixer.head_dim)  # t_k × W_k, q · k
    head += pairs * (width + 1) * mixer.value_dim  # t_v × W_v, weight v
    out = 2 if mixer.gated else 1  # c × W_o, t × W_gate
    return mixer.heads * (head + out * tokens * mixer.value_dim * width)
