"""Rung 3: vectors of vectors become matrices, `softmax(Q Kᵀ / √(d/h) + M) V`, head by head.

The n vectors of the prompt are the rows of one matrix, and the loops over tokens are gone.
Letters: n tokens, d width, h heads, d/h size of a head, F hidden size, v vocabulary.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from llmcli.ladder import letters
from llmcli.ladder.rung import Rung
from llmcli.ladder.weights import LayerWeights
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import Activation
from llmcli.parts.norm.config import NormConfig

Turns = tuple[Tensor, Tensor]  # cos and sin


class Matrices(Rung):
    """The forward pass on `[n, d]` matrices, with a loop over the heads."""

    number: ClassVar[int] = 3
    name: ClassVar[str] = "matrices"
    title: ClassVar[str] = "vectors of vectors become matrices, one head at a time"

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[n, v]`; with `until=i` the rows `[n, d]` after layer i."""
        of = self.weights
        X = of.W_E[ids]
        if of.W_P is not None:
            X = X + of.W_P[torch.arange(len(ids))]
        self.enter("the input")
        self.show("X = W_E[ids]" + ("" if of.W_P is None else " + W_P[positions]"), X, "n × d")
        for i, layer in enumerate(of.layers[: None if until is None else until + 1]):
            self.enter_block(i)
            X = self._block(layer, X)
        if until is not None:
            return X
        self.leave_blocks(X, "n × d")
        H = self._norm("H′ = norm(H)", X, of.ln_w, of.ln_b, self.config.final_norm, "n × d")
        axes = "(n × d)(d × v) = n × v"
        return self._product("logits = H′ W_head", H, of.W_head, of.b_head, axes, self.tied)

    def _block(self, layer: LayerWeights, X: Tensor) -> Tensor:
        config = layer.config
        rows = "n × d"
        T1 = self._norm("T¹ = norm(X)", X, layer.ln1_w, layer.ln1_b, config.ln1, rows)
        T2 = self._attention(layer, T1)
        T3 = T2 + X
        self.show("T³ = T² + X", T3, rows, note=letters.FIRST_RESIDUAL)
        T4 = self._norm("T⁴ = norm(T³)", T3, layer.ln2_w, layer.ln2_b, config.ln2, rows)
        T5 = self._feed_forward(layer, T4)
        H = T5 + T3
        self.show("H = T⁵ + T³", H, rows, note=letters.SECOND_RESIDUAL)
        return H

    def _attention(self, layer: LayerWeights, T: Tensor) -> Tensor:
        """Every head's context matrix, side by side, through W_o."""
        mixer = layer.config.mixer
        M = mask(len(T), mixer.window).to(T)
        turns = self._turns(layer, len(T))
        queries = [self._queries(layer, T, head, turns) for head in range(mixer.heads)]
        keys_values = [self._keys_values(layer, T, head, turns) for head in range(mixer.kv_heads)]
        group = mixer.heads // mixer.kv_heads  # heads that share keys and values
        contexts = []
        for head, Q in enumerate(queries):
            K, V = keys_values[head // group]
            contexts.append(self._attend(layer, Q, K, V, M))
        C = torch.cat(contexts, 1)
        axes = self.letters.C
        self.show("C = C¹ ⊕ … ⊕ Cʰ, of the h heads", C, f"n × {axes}")
        product = f"(n × {axes})({axes} × d) = n × d"
        return self._product("T² = C W_o", C, layer.W_o, layer.b_o, product)

    def _queries(self, layer: LayerWeights, T: Tensor, head: int, turns: Turns | None) -> Tensor:
        """`Q = T W_q` of one head, `[n, d/h]`: its W_q is d/h columns of the stored one, a view."""
        size = layer.config.mixer.head_dim
        cut = slice(head * size, (head + 1) * size)
        b_q = None if layer.b_q is None else layer.b_q[cut]
        product = "(n × d)(d × d/h) = n × d/h"
        Q = self._product("Q = T¹ W_q", T, layer.W_q[:, cut], b_q, product)
        return self._placed("Q", Q, layer, turns, "n × d/h")

    def _keys_values(
        self, layer: LayerWeights, T: Tensor, head: int, turns: Turns | None
    ) -> tuple[Tensor, Tensor]:
        """`K = T W_k` and `V = T W_v` of one key/value head."""
        mixer = layer.config.mixer
        cut_k = slice(head * mixer.head_dim, (head + 1) * mixer.head_dim)
        cut_v = slice(head * mixer.value_dim, (head + 1) * mixer.value_dim)
        b_k = None if layer.b_k is None else layer.b_k[cut_k]
        b_v = None if layer.b_v is None else layer.b_v[cut_v]
        dv = self.letters.dv
        product = "(n × d)(d × d/h) = n × d/h"
        K = self._product("K = T¹ W_k", T, layer.W_k[:, cut_k], b_k, product)
        K = self._placed("K", K, layer, turns, "n × d/h")
        product = f"(n × d)(d × {dv}) = n × {dv}"
        return K, self._product("V = T¹ W_v", T, layer.W_v[:, cut_v], b_v, product)

    def _attend(self, layer: LayerWeights, Q: Tensor, K: Tensor, V: Tensor, M: Tensor) -> Tensor:
        """`softmax(Q Kᵀ / √(d/h) + M) V` of one head, `[n, d/h]`."""
        mixer = layer.config.mixer
        axes = self.letters
        q, k = axes.placed("Q"), axes.placed("K")
        note = f"{q} {k} is not defined: n × d/h times n × d/h"
        self.show(f"{k}ᵀ", K.t(), "d/h × n", source=K, note=note)
        S = Q @ K.t() * mixer.scale
        formula, product = axes.scaled(f"{q} {k}ᵀ"), "(n × d/h)(d/h × n) = n × n"
        self.show(f"S = {formula}", S, product, note=lambda: cell(Q, K, S, mixer))
        self.show("M, the mask", M, "n × n")
        S_M = S + M
        self.show("S + M", S_M, "n × n")
        A = softmax(S_M)
        self.show("A = softmax(S + M)", A, "n × n", note="row by row: each sums to 1")
        C = A @ V
        self.show("C = A V", C, f"(n × n)(n × {axes.dv}) = n × {axes.dv}")
        return C

    def _placed(
        self, name: str, X: Tensor, layer: LayerWeights, turns: Turns | None, axes: str
    ) -> Tensor:
        """Queries or keys normalized and rotated by position, where the model does that."""
        qk_norm = layer.config.mixer.qk_norm
        weight = layer.q_norm if name.startswith("Q") else layer.k_norm
        if weight is not None and qk_norm is not None:
            X = self._norm(f"{name}_norm = norm({name})", X, weight, None, qk_norm, axes)
            name = f"{name}_norm"
        if turns is None:
            return X
        cos, sin = turns
        half = cos.shape[-1]
        a, b, rest = X[..., :half], X[..., half : 2 * half], X[..., 2 * half :]
        X = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
        self.show(f"{name[0]}_rot = R(position) {name}", X, axes)
        return X

    def _turns(self, layer: LayerWeights, n: int) -> Turns | None:
        """cos and sin of every position and pair, `[n, R/2]`; None where nothing rotates."""
        angles = self.weights.angles(layer, n)
        if angles is None:
            return None
        positions = torch.arange(n, dtype=torch.float64)
        turns = torch.outer(positions, torch.tensor(angles[0], dtype=torch.float64))
        like = layer.W_q
        return (turns.cos() * angles[1]).to(like), (turns.sin() * angles[1]).to(like)

    def _feed_forward(self, layer: LayerWeights, T: Tensor) -> Tensor:
        """`T⁵ = FFN(T⁴)`: each layer `Activation(X W + B)`, no activation after the last."""
        kind, gated = layer.config.ffn.activation, layer.W_gate is not None
        F = self.letters.F
        wide = f"(n × d)(d × {F}) = n × {F}"
        up = self._product("U = T⁴ W_up", T, layer.W_up, layer.b_up, wide)
        hidden = activate(kind, up)
        if layer.W_gate is not None:
            gate = self._product("G = T⁴ W_gate", T, layer.W_gate, layer.b_gate, wide)
            hidden = activate(kind, gate) * up
        note = f"Layer = Activation(X W + B), {F} wide"
        self.show(letters.layer_formula(kind, gated=gated), hidden, f"n × {F}", note=note)
        narrow = f"(n × {F})({F} × d) = n × d"
        return self._product("T⁵ = L W_down", hidden, layer.W_down, layer.b_down, narrow)

    def _product(
        self, formula: str, X: Tensor, W: Tensor, b: Tensor | None, axes: str, note: str = ""
    ) -> Tensor:
        """`X W + b`: all rows times a matrix (GEMM), b added to every row where there is one."""
        Y = X @ W
        if b is not None:
            Y = Y + b
            formula += " + b" + formula[formula.rindex("_") :]
        self.show(formula, Y, axes, note=note)
        return Y

    def _norm(
        self, formula: str, X: Tensor, w: Tensor, b: Tensor | None, config: NormConfig, axes: str
    ) -> Tensor:
        """Each row: `(x - mean) / √(variance + ε) · scale + shift`; RMSNorm without the mean."""
        mean_formula, square_formula, formula = letters.norm_formulas(formula, config)
        one = axes.rpartition(" × ")[0] + " × 1"
        if config.kind == "layer":
            mean = X.mean(-1, keepdim=True)
            self.show(mean_formula, mean, one)
            X = X - mean
        square = (X * X).mean(-1, keepdim=True)
        self.show(square_formula, square, one)
        Y = w * X / (square + config.eps).sqrt()
        if b is not None:
            Y = Y + b
        self.show(formula, Y, axes)
        return Y


def cell(Q: Tensor, K: Tensor, S: Tensor, mixer: AttentionConfig) -> str:
    """The score of the last query and the first key, spelled out, and the scale's value."""
    i = len(Q) - 1
    terms = " + ".join(f"({a:.3g})({b:.3g})" for a, b in zip(Q[i, :2], K[0, :2], strict=True))
    root = f"/ {mixer.scale**-1:.4g}" if letters.usual(mixer) else f"· {mixer.scale:.4g}"
    rows = f"({letters.placed('Q', mixer)} row {i} · {letters.placed('K', mixer)} row 0) {root}"
    spelled = f"{letters.scale(mixer)}\nS[{i},0] = {rows}"
    return f"{spelled}\n= ({terms} + …) {root} = {S[i, 0]:.4g}"


def mask(n: int, window: int | None) -> Tensor:
    """M `[n, n]`: −∞ where key j is after query i, or a whole window before it; 0 elsewhere."""
    hidden = torch.full((n, n), -torch.inf)
    return hidden.triu(1) if window is None else hidden.triu(1) + hidden.tril(-window)


def softmax(scores: Tensor) -> Tensor:
    """Each row `exp(s) / Σ exp(s)`; its largest is subtracted first so that nothing overflows."""
    powers = (scores - scores.max(-1, keepdim=True).values).exp()
    return powers / powers.sum(-1, keepdim=True)


def activate(kind: Activation, X: Tensor) -> Tensor:
    """What each neuron does with its sum, number by number."""
    if kind == "silu":
        return X * torch.sigmoid(X)
    if kind == "quick_gelu":
        return X * torch.sigmoid(1.702 * X)
    if kind == "gelu":
        return 0.5 * X * (1 + torch.erf(X / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * X * (1 + torch.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
    positive = torch.clamp(X, min=0)
    return positive**2 if kind == "relu2" else positive
