"""Rung 3: vectors of vectors become matrices, `softmax(mask(Q Kᵀ) / √(d/h)) V`, head by head.

The n vectors of the prompt are the rows of one matrix, and the loops over tokens are gone.
Letters: n tokens, d width, h heads, d/h size of a head, F hidden size, v vocabulary.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from llmcli.config import Activation, NormConfig
from llmcli.ladder.rung import Rung
from llmcli.ladder.weights import LayerWeights

Turns = tuple[Tensor, Tensor]  # cos and sin


class Matrices(Rung):
    """The forward pass on `[n, d]` matrices, with a loop over the heads."""

    number: ClassVar[int] = 3
    name: ClassVar[str] = "matrices"
    title: ClassVar[str] = "vectors of vectors are matrices: all tokens at once, one head at a time"
    change: ClassVar[tuple[str, str]] = (
        "for every t_q: softmax(q Kᵀ / √(d/h)) V",
        "Q = T W_q, K = T W_k, V = T W_v; softmax(mask(Q Kᵀ) / √(d/h)) V",
    )
    idea: ClassVar[str] = (
        "Row i of a product T W is t_i W, so the n products of a row are one product of matrices "
        "(GEMM), which reads W once instead of n times. A product takes columns on its right, "
        "and the keys are the rows of K: hence Kᵀ, a view that moves nothing. Now every query "
        "meets every key, and the mask M (−∞ above the diagonal) hides the later tokens before "
        "the softmax; the half of Q Kᵀ that it hides is computed in vain and still cheaper than "
        "a loop. The formula is often written without the mask, and even without the "
        "transpose; it needs both. The feed-forward's activation follows its hidden layer only."
    )

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[n, v]`; with `until=i` the rows `[n, d]` after layer i."""
        of = self.weights
        X = of.W_E[ids]
        if of.W_P is not None:
            X = X + of.W_P[torch.arange(len(ids))]
        self.show("X = W_E[ids]" + ("" if of.W_P is None else " + W_P[positions]"), X)
        for layer in of.layers[: None if until is None else until + 1]:
            X = self._block(layer, X)
        if until is not None:
            return X
        T = self._norm("T = norm(H)", X, of.ln_w, of.ln_b, self.config.final_norm)
        return self._product("logits = T W_head", T, of.W_head, of.b_head)

    def _block(self, layer: LayerWeights, X: Tensor) -> Tensor:
        config = layer.config
        T1 = self._norm("T = T¹ = norm(X)", X, layer.ln1_w, layer.ln1_b, config.ln1)
        T2 = self._attention(layer, T1)
        T3 = T2 + X
        self.show("T³ = T² + X", T3)
        T4 = self._norm("T⁴ = norm(T³)", T3, layer.ln2_w, layer.ln2_b, config.ln2)
        T5 = self._feed_forward(layer, T4)
        H = T5 + T3
        self.show("H = T⁵ + T³", H)
        return H

    def _attention(self, layer: LayerWeights, T: Tensor) -> Tensor:
        """Every head's context matrix, side by side, through W_o."""
        mixer = layer.config.mixer
        M = mask(len(T), mixer.window).to(T)
        self.show("mask M", M)
        turns = self._turns(layer, len(T))
        keys_values = [self._keys_values(layer, T, head, turns) for head in range(mixer.kv_heads)]
        group = mixer.heads // mixer.kv_heads  # heads that share keys and values
        contexts = []
        for head in range(mixer.heads):
            Q = self._queries(layer, T, head, turns)
            K, V = keys_values[head // group]
            contexts.append(self._attend(layer, Q, K, V, M))
        C = torch.cat(contexts, 1)
        self.show("C = C¹ ⊕ … ⊕ Cʰ", C)
        return self._product("T² = attention(T¹) = C W_o", C, layer.W_o, layer.b_o)

    def _queries(self, layer: LayerWeights, T: Tensor, head: int, turns: Turns | None) -> Tensor:
        """`Q = T W_q` of one head, `[n, d/h]`: its W_q is d/h columns of the stored one, a view."""
        size = layer.config.mixer.head_dim
        cut = slice(head * size, (head + 1) * size)
        b_q = None if layer.b_q is None else layer.b_q[cut]
        Q = self._product("Q = T W_q", T, layer.W_q[:, cut], b_q)
        return self._placed("Q", Q, layer, layer.q_norm, turns)

    def _keys_values(
        self, layer: LayerWeights, T: Tensor, head: int, turns: Turns | None
    ) -> tuple[Tensor, Tensor]:
        """`K = T W_k` and `V = T W_v` of one key/value head."""
        mixer = layer.config.mixer
        cut_k = slice(head * mixer.head_dim, (head + 1) * mixer.head_dim)
        cut_v = slice(head * mixer.value_dim, (head + 1) * mixer.value_dim)
        b_k = None if layer.b_k is None else layer.b_k[cut_k]
        b_v = None if layer.b_v is None else layer.b_v[cut_v]
        K = self._product("K = T W_k", T, layer.W_k[:, cut_k], b_k)
        V = self._product("V = T W_v", T, layer.W_v[:, cut_v], b_v)
        return self._placed("K", K, layer, layer.k_norm, turns), V

    def _attend(self, layer: LayerWeights, Q: Tensor, K: Tensor, V: Tensor, M: Tensor) -> Tensor:
        """`softmax(mask(Q Kᵀ) / √(d/h)) V` of one head, `[n, d/h]`."""
        mixer = layer.config.mixer
        self.show("Kᵀ", K.t(), source=K)
        scores = Q @ K.t()
        self.show("scores = Q Kᵀ", scores)
        scores = scores + M
        self.show("scores + M", scores)
        scores = scores * mixer.scale
        usual = math.isclose(mixer.scale, mixer.head_dim**-0.5)
        self.show("scores / √(d/h)" if usual else "scores · scale", scores)
        A = softmax(scores)
        self.show("A = softmax(scores)", A)
        C = A @ V
        self.show("C = A V", C)
        return C

    def _placed(
        self, name: str, X: Tensor, layer: LayerWeights, weight: Tensor | None, turns: Turns | None
    ) -> Tensor:
        """Queries or keys normalized and rotated by position, where the model does that."""
        qk_norm = layer.config.mixer.qk_norm
        if weight is not None and qk_norm is not None:
            X = self._norm(f"{name} = norm({name})", X, weight, None, qk_norm)
        if turns is None:
            return X
        cos, sin = turns
        half = cos.shape[-1]
        a, b, rest = X[..., :half], X[..., half : 2 * half], X[..., 2 * half :]
        X = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
        self.show(f"{name} rotated by position", X)
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
        kind = layer.config.ffn.activation
        up = self._product("up = T⁴ W_up", T, layer.W_up, layer.b_up)
        if layer.W_gate is None:
            hidden = activate(kind, up)
            self.show(f"hidden = {kind}(up)", hidden)
        else:
            gate = self._product("gate = T⁴ W_gate", T, layer.W_gate, layer.b_gate)
            hidden = activate(kind, gate) * up
            self.show(f"hidden = {kind}(gate) ∘ up", hidden)
        return self._product("T⁵ = FFN(T⁴) = hidden W_down", hidden, layer.W_down, layer.b_down)

    def _product(self, formula: str, X: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        """`X W + b`: all rows times a matrix (GEMM), b added to every row where there is one."""
        Y = X @ W
        if b is not None:
            Y = Y + b
            formula += " + b" + formula[formula.rindex("_") :]
        self.show(formula, Y)
        return Y

    def _norm(
        self, formula: str, X: Tensor, w: Tensor, b: Tensor | None, config: NormConfig
    ) -> Tensor:
        """Each row: `scale · (x - mean) / √(variance + ε) + shift`; RMSNorm without the mean."""
        layer_norm = config.kind == "layer"
        if layer_norm:
            X = X - X.mean(-1, keepdim=True)
        root = ((X * X).mean(-1, keepdim=True) + config.eps).sqrt()
        self.show("√(variance + ε)" if layer_norm else "√(mean(x²) + ε)", root)
        Y = w * X / root
        if b is not None:
            Y = Y + b
        self.show(formula.replace("norm", "LayerNorm" if layer_norm else "RMSNorm"), Y)
        return Y


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
    if kind == "gelu":
        return 0.5 * X * (1 + torch.erf(X / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * X * (1 + torch.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
    return torch.clamp(X, min=0)
