"""Rung 1: an LLM as concepts, loops over vectors and not one matrix.

A vector is a Python list. A weight matrix is the list of its columns: a column holds the weights
of one neuron. Letters: n tokens, d width, h heads, d/h size of a head (its own where a model has
one), F hidden size of the feed-forward, v vocabulary. All in float64, whatever the model's dtype.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from llmcli.config import ModelConfig
from llmcli.ladder import letters
from llmcli.ladder.block import plain_blocks
from llmcli.ladder.rung import Rung, Show, silent
from llmcli.ladder.weights import LayerWeights, Weights
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import Activation
from llmcli.parts.norm.config import NormConfig

Vector = list[float]
Vectors = list[Vector]
Neurons = tuple[Vectors, Vector | None]  # the weights of each neuron, and the biases


class Loops(Rung):
    """The forward pass token by token, head by head, neuron by neuron."""

    number: ClassVar[int] = 1
    name: ClassVar[str] = "loops"
    title: ClassVar[str] = "loops over vectors: every query token, every key token, every neuron"

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self._converted: dict[int, Vectors] = {}

    def prepare(self, until: int | None = None) -> None:
        """Turns tensors into lists ahead: the layers up to `until`, or all of them and the head."""
        for layer in self.weights.layers[: None if until is None else until + 1]:
            for W in (layer.W_q, layer.W_k, layer.W_v, layer.W_o, layer.W_up, layer.W_down):
                self._columns(W)
            if layer.W_gate is not None:
                self._columns(layer.W_gate)
        if until is None:
            self._columns(self.weights.W_head)

    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[n, v]` in float64; with `until=i` the rows `[n, d]` after layer i."""
        X = self._embed(ids.tolist())
        for i, layer in enumerate(self.weights.layers[: None if until is None else until + 1]):
            self.enter_block(i)
            X = self._block(layer, X)
        if until is not None:
            return torch.tensor(X, dtype=torch.float64)
        of = self.weights
        self.leave_blocks(X[-1], "d", name="H_q")
        H = self._norm("H′_q = norm(H_q)", X, of.ln_w, of.ln_b, self.config.final_norm)
        head = self._neurons(of.W_head, of.b_head)
        logits = [times(h, head) for h in H]
        formula = "logits = H′_q × W_head" + plus("b_head", head)
        self.show(formula, logits[-1], "(d)(d × v) = v", note=self.tied)
        return torch.tensor(logits, dtype=torch.float64)

    def _embed(self, ids: list[int]) -> Vectors:
        """For every token its row of W_E, and where positions are learned that of its position."""
        W_E, W_P = self.weights.W_E, self.weights.W_P
        X = []
        for position, token in enumerate(ids):
            x = W_E[token].tolist()
            X.append(x if W_P is None else add(x, W_P[position].tolist()))
        learned = "" if W_P is None else " + W_P[position]"
        self.enter("the input")
        self.show(f"X: x = W_E[id]{learned} for every token", X, "n × d")
        return X

    def _block(self, layer: LayerWeights, X: Vectors) -> Vectors:
        """T¹ = norm(X), T² = attention(T¹), T³ = T² + X, T⁴ = norm(T³), T⁵ = FFN(T⁴), T⁵ + T³."""
        config = layer.config
        last = len(X) - 1  # of the steps that every token takes, those of the last are shown
        self.show("x, the query token's row of X", X[last], "d", token=last)
        T1 = self._norm("t¹ = norm(x)", X, layer.ln1_w, layer.ln1_b, config.ln1)
        T2 = self._attention(layer, T1)
        T3 = [add(t2, x) for t2, x in zip(T2, X, strict=True)]
        self.show("t³ = t² + x", T3[last], "d", note=letters.FIRST_RESIDUAL)
        T4 = self._norm("t⁴ = norm(t³)", T3, layer.ln2_w, layer.ln2_b, config.ln2)
        T5 = [self._feed_forward(layer, t4, self._shows(i, X)) for i, t4 in enumerate(T4)]
        H = [add(t5, t3) for t5, t3 in zip(T5, T3, strict=True)]
        self.show("H_q = t⁵ + t³", H[last], "d", note=letters.SECOND_RESIDUAL)
        self.show("H: H_q of every token", H, "n × d")
        return H

    def _norm(
        self, formula: str, X: Vectors, w: Tensor, b: Tensor | None, config: NormConfig
    ) -> Vectors:
        """Every row normalized by itself."""
        return [norm(formula, x, w, b, config, self._shows(i, X)) for i, x in enumerate(X)]

    def _attention(self, layer: LayerWeights, T: Vectors) -> Vectors:
        """Every head's contexts, concatenated token by token, through W_o."""
        W_o = self._neurons(layer.W_o, layer.b_o)
        contexts: Vectors = [[] for _ in T]
        for head in range(layer.config.mixer.heads):
            for i, context in enumerate(self._head(layer, T, head)):
                contexts[i] = contexts[i] + context
        axes = self.letters
        self.show("c = c¹ ⊕ … ⊕ cʰ, of the h heads", contexts[-1], axes.C)
        T2 = [times(c, W_o) for c in contexts]
        self.show("t² = c × W_o" + plus("b_o", W_o), T2[-1], f"({axes.C})({axes.C} × d) = d")
        return T2

    def _head(self, layer: LayerWeights, T: Vectors, head: int) -> Vectors:
        """The context vector of every token in one head: the documents' nested loop."""
        mixer = layer.config.mixer
        shared = head // (mixer.heads // mixer.kv_heads)  # heads may share keys and values
        W_q = self._neurons(layer.W_q, layer.b_q, head, mixer.head_dim)
        W_k = self._neurons(layer.W_k, layer.b_k, shared, mixer.head_dim)
        W_v = self._neurons(layer.W_v, layer.b_v, shared, mixer.value_dim)
        angles = self.weights.angles(layer, len(T))
        axes = self.letters
        one, value = "(d)(d × d/h) = d/h", f"(d)(d × {axes.dv}) = {axes.dv}"
        contexts = []
        for i, t_q in enumerate(T):
            show = self._shows(i, T)
            q = times(t_q, W_q)
            show("q = t_q × W_q" + plus("b_q", W_q), q, one, token=i)
            q = place("q", q, i, layer.q_norm, mixer, angles, show)
            scores = []
            for j in seen(i, mixer):
                t_k = T[j]
                k = times(t_k, W_k)
                show("k = t_k × W_k" + plus("b_k", W_k), k, one, token=j)
                k = place("k", k, j, layer.k_norm, mixer, angles, show)
                scores.append(dot(q, k))
            n = "n" if len(scores) == len(T) else "seen"
            show(f"score = {axes.placed('q')} · {axes.placed('k')}, for every t_k", scores, n)
            weights = softmax(scores, mixer, n, show)
            context = [0.0] * mixer.value_dim
            for j, weight in zip(seen(i, mixer), weights, strict=True):
                t_v = T[j]
                v = times(t_v, W_v)
                show("v = t_v × W_v" + plus("b_v", W_v), v, value, token=j)
                context = add_weighted(context, weight, v)
            show("c = Σ a · v, over every t_v", context, axes.dv)
            contexts.append(context)
        return contexts

    def _feed_forward(self, layer: LayerWeights, t: Vector, show: Show) -> Vector:
        """Each neuron of the hidden layer: dot product, bias, activation; then the output's."""
        kind = layer.config.ffn.activation
        W_up = self._neurons(layer.W_up, layer.b_up)
        W_down = self._neurons(layer.W_down, layer.b_down)
        F = self.letters.F
        wide = f"(d)(d × {F}) = {F}"
        up = times(t, W_up)
        show("u = t⁴ × W_up" + plus("b_up", W_up), up, wide, note="a number for every neuron")
        hidden = [activate(kind, a) for a in up]
        if layer.W_gate is not None:
            W_gate = self._neurons(layer.W_gate, layer.b_gate)
            gate = times(t, W_gate)
            show("g = t⁴ × W_gate" + plus("b_gate", W_gate), gate, wide)
            hidden = [activate(kind, a) * b for a, b in zip(gate, up, strict=True)]
        show(letters.layer_formula(kind, gated=layer.W_gate is not None, small=True), hidden, F)
        out = times(hidden, W_down)
        show("t⁵ = l × W_down" + plus("b_down", W_down), out, f"({F})({F} × d) = d")
        return out

    def _neurons(self, W: Tensor, b: Tensor | None, head: int = 0, size: int = 0) -> Neurons:
        """The columns of W `[in, out]` and the biases; those of one head where `size` is given."""
        cut = slice(head * size, (head + 1) * size) if size else slice(None)
        return self._columns(W)[cut], None if b is None else b[cut].tolist()

    def _columns(self, W: Tensor) -> Vectors:
        """W as the list of its columns, converted the first time."""
        if id(W) not in self._converted:
            self._converted[id(W)] = W.double().t().tolist()
        return self._converted[id(W)]

    def _shows(self, i: int, tokens: Vectors) -> Show:
        """Of the steps that every token takes, those of the last one: it sees all the others."""
        return self.show if i == len(tokens) - 1 else silent


def dot(a: Vector, b: Vector) -> float:
    """`a · b`, the one operation that everything is made of."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += x * y
    return total


def times(t: Vector, neurons: Neurons) -> Vector:
    """`t × W + b`: neuron j is the dot product of t with column j, plus its bias."""
    columns, biases = neurons
    out = [dot(t, column) for column in columns]
    return out if biases is None else add(out, biases)


def add(a: Vector, b: Vector) -> Vector:
    """`a + b`, number by number."""
    return [x + y for x, y in zip(a, b, strict=True)]


def add_weighted(total: Vector, weight: float, v: Vector) -> Vector:
    """`total + weight · v`."""
    return [c + weight * x for c, x in zip(total, v, strict=True)]


def plus(name: str, neurons: Neurons) -> str:
    """The bias's part of a formula, where there is one."""
    return "" if neurons[1] is None else f" + {name}"


def seen(i: int, mixer: AttentionConfig) -> range:
    """The tokens that token i may see: those up to itself, or the last `window` of them."""
    return range(0 if mixer.window is None else max(0, i + 1 - mixer.window), i + 1)


def softmax(scores: Vector, mixer: AttentionConfig, n: str, show: Show) -> Vector:
    """Scaled, then `exp(s) / Σ exp(s)`; the largest is subtracted so that nothing overflows."""
    scaled = [score * mixer.scale for score in scores]
    show(f"s = {letters.scaled('score', mixer)}", scaled, n, note=letters.scale(mixer))
    largest = max(scaled)
    powers = [math.exp(score - largest) for score in scaled]
    total = sum(powers)
    weights = [power / total for power in powers]
    show("a = softmax(s)", weights, n)
    return weights


def norm(
    formula: str, x: Vector, w: Tensor, b: Tensor | None, config: NormConfig, show: Show
) -> Vector:
    """`(x - mean) / √(variance + ε) · scale + shift`; RMSNorm: `x / √(mean(x²) + ε) · scale`."""
    mean_formula, square_formula, formula = letters.norm_formulas(formula, config)
    if config.kind == "layer":
        mean = sum(x) / len(x)
        show(mean_formula, mean)
        x = [a - mean for a in x]
    square = sum(a * a for a in x) / len(x)
    show(square_formula, square)
    root = math.sqrt(square + config.eps)
    y = [scale * a / root for scale, a in zip(w.tolist(), x, strict=True)]
    if b is not None:
        y = add(y, b.tolist())
    show(formula, y, "d/h" if formula[0] in "qk" else "d")
    return y


def place(
    name: str,
    x: Vector,
    position: int,
    weight: Tensor | None,
    mixer: AttentionConfig,
    angles: tuple[Vector, float] | None,
    show: Show,
) -> Vector:
    """A head's query or key normalized and rotated by its position, where the model does that."""
    if weight is not None and mixer.qk_norm is not None:
        x = norm(f"{name}_norm = norm({name})", x, weight, None, mixer.qk_norm, show)
    if angles is None:
        return x
    per_position, factor = angles
    half = len(per_position)
    turned = list(x)  # beyond the rotated numbers it stays as it is
    for i, angle in enumerate(per_position):
        cos, sin = math.cos(position * angle) * factor, math.sin(position * angle) * factor
        a, b = x[i], x[i + half]
        turned[i], turned[i + half] = a * cos - b * sin, b * cos + a * sin
    before = name if mixer.qk_norm is None else f"{name}_norm"
    show(f"{name}_rot = R(position) {before}", turned, "d/h", token=position)
    return turned


def activate(kind: Activation, x: float) -> float:
    """What a neuron does with its sum."""
    if kind == "silu":
        return x * 0.5 * (1 + math.tanh(x / 2))  # x · σ(x), without overflow
    if kind == "quick_gelu":
        return x * 0.5 * (1 + math.tanh(0.851 * x))
    if kind == "gelu":
        return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return max(x, 0.0) ** (2 if kind == "relu2" else 1)


def multiply_adds(config: ModelConfig, tokens: int, until: int | None = None) -> int:
    """Multiply-adds of the dot products and weighted sums of `forward` on that many tokens.

    Those of the layers up to `until`, without the head, where it is given. The rest is small.
    """
    count = 0
    for layer in plain_blocks(config)[: None if until is None else until + 1]:
        mixer, ffn = layer.mixer, layer.ffn
        pairs = sum(len(seen(i, mixer)) for i in range(tokens))
        count += mixer.heads * tokens * config.width * mixer.head_dim  # t_q × W_q
        count += mixer.heads * pairs * (config.width + 1) * mixer.head_dim  # t_k × W_k, q · k
        count += mixer.heads * pairs * (config.width + 1) * mixer.value_dim  # t_v × W_v, weight v
        count += tokens * mixer.heads * mixer.value_dim * config.width  # c × W_o
        count += tokens * config.width * ffn.hidden * (3 if ffn.gated else 2)
    return count if until is not None else count + tokens * config.width * config.vocab
