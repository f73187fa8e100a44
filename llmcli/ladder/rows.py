"""Rung 2: one query at a time, `softmax(q Kᵀ / √(d/h)) V`.

Vectors are tensors now, and what was a loop over key tokens is one product of a row with a
matrix (a GEMV). Letters: n tokens, d width, h heads, d/h size of a head, F hidden size, v
vocabulary.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from llmcli.ladder import letters
from llmcli.ladder.rung import Rung, Show, silent
from llmcli.ladder.weights import LayerWeights
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import Activation
from llmcli.parts.norm.config import NormConfig


class Rows(Rung):
    """The forward pass token by token; each token's arithmetic is vectors times matrices."""

    number: ClassVar[int] = 2
    name: ClassVar[str] = "rows"
    title: ClassVar[str] = "one query at a time: its scores and its context are one product each"

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[n, v]`; with `until=i` the rows `[n, d]` after layer i."""
        self._turns: dict[object, tuple[Tensor, Tensor] | None] = {}
        X = self._embed(ids)
        for i, layer in enumerate(self.weights.layers[: None if until is None else until + 1]):
            self.enter_block(i)
            X = self._block(layer, X)
        if until is not None:
            return torch.stack(X)
        of = self.weights
        self.leave_blocks(X[-1], "d", name="H_q")
        logits = []
        for i, x in enumerate(X):
            show = self._shows(i, X)
            h = norm("H′_q = norm(H_q)", x, of.ln_w, of.ln_b, self.config.final_norm, show)
            formula, axes = "logits = H′_q W_head", "(d)(d × v) = v"
            logits.append(times(formula, h, of.W_head, of.b_head, axes, show, self.tied))
        return torch.stack(logits)

    def _embed(self, ids: Tensor) -> list[Tensor]:
        """For every token its row of W_E, and where positions are learned that of its position."""
        W_E, W_P = self.weights.W_E, self.weights.W_P
        X = []
        for position, token in enumerate(ids.tolist()):
            x = W_E[token]
            X.append(x if W_P is None else x + W_P[position])
        learned = "" if W_P is None else " + W_P[position]"
        self.enter("the input")
        self.show(f"x = W_E[id]{learned}", X[-1], "d", token=len(X) - 1)
        return X

    def _block(self, layer: LayerWeights, X: list[Tensor]) -> list[Tensor]:
        """T¹ = norm(X), T² = attention(T¹), T³ = T² + X, T⁴ = norm(T³), T⁵ = FFN(T⁴), T⁵ + T³."""
        T1 = [
            norm("t¹ = norm(x)", x, layer.ln1_w, layer.ln1_b, layer.config.ln1, self._shows(i, X))
            for i, x in enumerate(X)
        ]
        T2 = self._attention(layer, T1)
        F = self.letters.F
        H = []
        for i, (t2, x) in enumerate(zip(T2, X, strict=True)):
            show = self._shows(i, X)
            t3 = t2 + x
            show("t³ = t² + x", t3, "d", note=letters.FIRST_RESIDUAL)
            t4 = norm("t⁴ = norm(t³)", t3, layer.ln2_w, layer.ln2_b, layer.config.ln2, show)
            t5 = feed_forward(layer, t4, F, show)
            H.append(t5 + t3)
            show("H_q = t⁵ + t³", H[-1], "d", note=letters.SECOND_RESIDUAL)
        return H

    def _attention(self, layer: LayerWeights, T: list[Tensor]) -> list[Tensor]:
        """Every head's contexts, concatenated token by token, through W_o."""
        mixer = layer.config.mixer
        axes = self.letters
        keys_values = [self._keys_values(layer, T, head) for head in range(mixer.kv_heads)]
        group = mixer.heads // mixer.kv_heads  # heads that share keys and values
        T2 = []
        for i, t in enumerate(T):
            show = self._shows(i, T)
            contexts = []
            for head in range(mixer.heads):
                q = self._query(layer, t, i, head, len(T))
                K, V = keys_values[head // group]
                contexts.append(attend(q, K, V, i, mixer, show))
            c = torch.cat(contexts)
            show("c = c¹ ⊕ … ⊕ cʰ, of the h heads", c, axes.C)
            product = f"({axes.C})({axes.C} × d) = d"
            T2.append(times("t² = c W_o", c, layer.W_o, layer.b_o, product, show))
        return T2

    def _query(self, layer: LayerWeights, t: Tensor, i: int, head: int, n: int) -> Tensor:
        """The query of token i in one head: `q = t W_q`, W_q being the head's columns."""
        mixer = layer.config.mixer
        show = self.show if i == n - 1 else silent
        cut = slice(head * mixer.head_dim, (head + 1) * mixer.head_dim)
        b_q = None if layer.b_q is None else layer.b_q[cut]
        product = "(d)(d × d/h) = d/h"
        q = times("q = t¹ W_q", t, layer.W_q[:, cut], b_q, product, show, token=i)
        return self._placed("q", q, i, layer, layer.q_norm, n, show)

    def _keys_values(
        self, layer: LayerWeights, T: list[Tensor], head: int
    ) -> tuple[Tensor, Tensor]:
        """The keys `[n, d/h]` and values of all tokens in one key/value head, a row per token."""
        mixer = layer.config.mixer
        cut_k = slice(head * mixer.head_dim, (head + 1) * mixer.head_dim)
        cut_v = slice(head * mixer.value_dim, (head + 1) * mixer.value_dim)
        b_k = None if layer.b_k is None else layer.b_k[cut_k]
        b_v = None if layer.b_v is None else layer.b_v[cut_v]
        dv = self.letters.dv
        keys, values = [], []
        for i, t in enumerate(T):
            show = self.show if i == 0 else silent  # all are in K and V, in the end
            product = "(d)(d × d/h) = d/h"
            k = times("k_i = t¹_i W_k", t, layer.W_k[:, cut_k], b_k, product, show, token=i)
            keys.append(self._placed("k_i", k, i, layer, layer.k_norm, len(T), show))
            product = f"(d)(d × {dv}) = {dv}"
            v = times("v_i = t¹_i W_v", t, layer.W_v[:, cut_v], b_v, product, show, token=i)
            values.append(v)
        K, V = torch.stack(keys), torch.stack(values)
        letter = letters.placed("K", mixer)
        self.show(f"{letter}: {letters.placed('k', mixer)} of every token", K, "n × d/h")
        self.show("V: v of every token", V, f"n × {dv}")
        return K, V

    def _placed(
        self,
        name: str,
        x: Tensor,
        position: int,
        layer: LayerWeights,
        weight: Tensor | None,
        n: int,
        show: Show,
    ) -> Tensor:
        """A query or key normalized and rotated by its position, where the model does that."""
        qk_norm = layer.config.mixer.qk_norm
        if weight is not None and qk_norm is not None:
            x = norm(f"{name}_norm = norm({name})", x, weight, None, qk_norm, show, "d/h")
            name = f"{name}_norm"
        turn = self._turn(layer, position, n)
        if turn is None:
            return x
        cos, sin = turn
        half = len(cos)
        a, b, rest = x[:half], x[half : 2 * half], x[2 * half :]
        x = torch.cat((a * cos - b * sin, b * cos + a * sin, rest))
        show(f"{name[0]}_rot = R(position) {name}", x, "d/h", token=position)
        return x

    def _turn(self, layer: LayerWeights, position: int, n: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin of every pair at a position; None where nothing rotates.

        Kept for the heads and layers that rotate alike: to compute them anew is no formula of
        this rung, and would be half of its time.
        """
        key = (layer.config.mixer.rope, position, n)
        if key not in self._turns:
            angles = self.weights.angles(layer, n)
            if angles is None:
                self._turns[key] = None
            else:
                per_position, factor = torch.tensor(angles[0], dtype=torch.float64), angles[1]
                turns = (f(position * per_position) * factor for f in (torch.cos, torch.sin))
                cos, sin = (turn.to(self.weights.W_E) for turn in turns)
                self._turns[key] = cos, sin
        return self._turns[key]

    def _shows(self, i: int, tokens: list[Tensor]) -> Show:
        """Of the steps that every token takes, those of the last one: it sees all the others."""
        return self.show if i == len(tokens) - 1 else silent


def attend(q: Tensor, K: Tensor, V: Tensor, i: int, mixer: AttentionConfig, show: Show) -> Tensor:
    """`softmax(q Kᵀ / √(d/h)) V` over the tokens that token i may see: the context `[d/h]`."""
    first = 0 if mixer.window is None else max(0, i + 1 - mixer.window)
    K, V = K[first : i + 1], V[first : i + 1]
    n = "n" if first == 0 else "W"
    letter, dv = letters.placed("K", mixer), "d/h" if mixer.value_dim == mixer.head_dim else "d_v"
    show(f"{letter}ᵀ", K.t(), f"d/h × {n}", source=K)
    scores = q @ K.t() * mixer.scale
    formula = letters.scaled(f"{letters.placed('q', mixer)} {letter}ᵀ", mixer)
    product = f"(d/h)(d/h × {n}) = {n}"
    show(f"s = {formula}", scores, product, note=letters.scale(mixer))
    weights = softmax(scores)
    show("a = softmax(s)", weights, n)
    context = weights @ V
    show("c = a V", context, f"({n})({n} × {dv}) = {dv}")
    return context


def feed_forward(layer: LayerWeights, t: Tensor, F: str, show: Show) -> Tensor:
    """`t⁵ = FFN(t⁴)` of one token: each layer `Activation(t W + b)`, none after the last."""
    kind = layer.config.ffn.activation
    wide = f"(d)(d × {F}) = {F}"
    up = times("u = t⁴ W_up", t, layer.W_up, layer.b_up, wide, show)
    if layer.W_gate is None:
        hidden = activate(kind, up)
    else:
        gate = times("g = t⁴ W_gate", t, layer.W_gate, layer.b_gate, wide, show)
        hidden = activate(kind, gate) * up
    formula = letters.layer_formula(kind, gated=layer.W_gate is not None, small=True)
    show(formula, hidden, F, note="Layer = Activation(x W + b)")
    return times("t⁵ = l W_down", hidden, layer.W_down, layer.b_down, f"({F})({F} × d) = d", show)


def times(
    formula: str,
    t: Tensor,
    W: Tensor,
    b: Tensor | None,
    axes: str,
    show: Show,
    note: str = "",
    token: int | None = None,
) -> Tensor:
    """`t W + b`: a row times a matrix (GEMV), and the bias where there is one."""
    y = t @ W
    if b is not None:
        y = y + b
        formula += " + b" + formula[formula.rindex("_") :]
    show(formula, y, axes, note=note, token=token)
    return y


def softmax(scores: Tensor) -> Tensor:
    """`exp(s) / Σ exp(s)`; the largest is subtracted first so that nothing overflows."""
    powers = (scores - scores.max()).exp()
    return powers / powers.sum()


def norm(
    formula: str,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    config: NormConfig,
    show: Show,
    axes: str = "d",
) -> Tensor:
    """`(x - mean) / √(variance + ε) · scale + shift`; RMSNorm: `x / √(mean(x²) + ε) · scale`."""
    mean_formula, square_formula, formula = letters.norm_formulas(formula, config)
    if config.kind == "layer":
        mean = x.mean()
        show(mean_formula, mean)
        x = x - mean
    square = (x * x).mean()
    show(square_formula, square)
    y = w * x / (square + config.eps).sqrt()
    if b is not None:
        y = y + b
    show(formula, y, axes)
    return y


def activate(kind: Activation, x: Tensor) -> Tensor:
    """What each neuron does with its sum."""
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    positive = torch.clamp(x, min=0)
    return positive**2 if kind == "relu2" else positive
