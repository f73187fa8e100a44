"""Rung 5: one matrix for queries, keys and values, `Q K V = T W_qkv` split in three views.

Letters: n tokens, d width, h heads, k key/value heads (k = h where each head has its own), d/h
size of a head, F hidden size, v vocabulary.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from llmcli.config import Activation, NormConfig
from llmcli.ladder.rung import Rung, Show, silent
from llmcli.ladder.weights import LayerWeights, Weights

Turns = tuple[Tensor, Tensor]  # cos and sin
Combined = tuple[Tensor, Tensor | None]  # W_qkv `[d, (h + k + k)·d/h]` and b_qkv


class CombinedQKV(Rung):
    """The forward pass with one product for the queries, keys and values of all heads."""

    number: ClassVar[int] = 5
    name: ClassVar[str] = "combined"
    title: ClassVar[str] = "combined QKV: one product instead of three"
    change: ClassVar[tuple[str, str]] = (
        "Q = T W_q, K = T W_k, V = T W_v",
        "W_qkv = W_q ⊕ W_k ⊕ W_v; Q, K, V = split(T W_qkv)",
    )
    idea: ClassVar[str] = (
        "The same columns side by side in one matrix give the same numbers side by side in one "
        "product, and the three slices of it are views. Nothing is saved in arithmetic: what two "
        "calls less save is their fixed cost, and one wide product fills a machine better than "
        "three narrow ones. The slices are Q, K and V; where "
        "heads share keys and values those two are narrower than Q."
    )

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self.combined = [combine(layer) for layer in weights.layers]

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[n, v]`; with `until=i` the rows `[n, d]` after layer i."""
        of = self.weights
        X = of.W_E[ids]
        if of.W_P is not None:
            X = X + of.W_P[torch.arange(len(ids))]
        self.show("X = W_E[ids]" + ("" if of.W_P is None else " + W_P[positions]"), X)
        count = len(of.layers) if until is None else until + 1
        for layer, combined in zip(of.layers[:count], self.combined[:count], strict=True):
            X = self._block(layer, combined, X)
        if until is not None:
            return X
        T = self._norm("T = norm(H)", X, of.ln_w, of.ln_b, self.config.final_norm)
        return self._product("logits = T W_head", T, of.W_head, of.b_head)

    def _block(self, layer: LayerWeights, combined: Combined, X: Tensor) -> Tensor:
        config = layer.config
        T1 = self._norm("T = T¹ = norm(X)", X, layer.ln1_w, layer.ln1_b, config.ln1)
        T2 = self._attention(layer, combined, T1)
        T3 = T2 + X
        self.show("T³ = T² + X", T3)
        T4 = self._norm("T⁴ = norm(T³)", T3, layer.ln2_w, layer.ln2_b, config.ln2)
        T5 = self._feed_forward(layer, T4)
        H = T5 + T3
        self.show("H = T⁵ + T³", H)
        return H

    def _attention(self, layer: LayerWeights, combined: Combined, T: Tensor) -> Tensor:
        """`softmax(mask(Q Kᵀ) / √(d/h)) V` of all heads at once, merged, through W_o."""
        mixer = layer.config.mixer
        W_qkv, b_qkv = combined
        self.show("W_qkv = W_q ⊕ W_k ⊕ W_v, as the model is built", W_qkv)
        QKV = self._product("QKV = T W_qkv", T, W_qkv, b_qkv)
        shared = mixer.kv_heads * mixer.value_dim
        Q, K, V = QKV.split_with_sizes(
            [mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, shared], -1
        )
        self.show("Q, the first columns", Q, source=QKV)
        self.show("K, the next columns", K, source=QKV)
        self.show("V, the last columns", V, source=QKV)
        k = "k" if mixer.kv_heads < mixer.heads else "h"  # the letter of their number
        turns = self._turns(layer, len(T))
        Q = self._placed("Q", self._split("Q", Q, mixer.heads), layer, layer.q_norm, turns)
        K = self._placed("K", self._split("K", K, mixer.kv_heads, k), layer, layer.k_norm, turns)
        V = self._split("V", V, mixer.kv_heads, k)
        if mixer.kv_heads < mixer.heads:
            Q, K, V = self._grouped(Q, K, V)
        KT = K.transpose(-2, -1)
        self.show("Kᵀ", KT, source=K)
        scores = Q @ KT
        self.show("scores = Q Kᵀ", scores)
        M = mask(len(T), mixer.window).to(T)
        self.show("mask M", M)
        scores = scores + M
        self.show("scores + M", scores)
        scores = scores * mixer.scale
        usual = math.isclose(mixer.scale, mixer.head_dim**-0.5)
        self.show("scores / √(d/h)" if usual else "scores · scale", scores)
        A = softmax(scores)
        self.show("A = softmax(scores)", A)
        C = A @ V
        self.show("C = A V", C)
        C = self._merge(C)
        return self._product("T² = attention(T¹) = C W_o", C, layer.W_o, layer.b_o)

    def _split(self, name: str, X: Tensor, heads: int, h: str = "h") -> Tensor:
        """`[n, h·d/h]` seen as `[n, h, d/h]`, and that as `[h, n, d/h]`: two views."""
        apart = X.view(len(X), heads, -1)
        self.show(f"{name} as n × {h} × d/h", apart, source=X)
        turned = apart.transpose(-3, -2)
        self.show(f"{name} as {h} × n × d/h", turned, source=apart)
        return turned

    def _grouped(self, Q: Tensor, K: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Several heads per key/value head: `[k, h/k, n, d/h]`, K and V seen h/k times (views)."""
        group = len(Q) // len(K)
        grouped = Q.view(len(K), group, *Q.shape[1:])
        self.show("Q as k × h/k × n × d/h", grouped, source=Q)
        shared_K, shared_V = (X.unsqueeze(1).expand(-1, group, -1, -1) for X in (K, V))
        self.show("K as k × h/k × n × d/h", shared_K, source=K)
        return grouped, shared_K, shared_V

    def _merge(self, C: Tensor) -> Tensor:
        """`[h, n, d/h]` back to `[n, h·d/h]`: the transpose is a view, the rows must be copied."""
        if C.ndim == 4:
            C = C.flatten(0, 1)
        turned = C.transpose(-3, -2)
        self.show("C as n × h × d/h", turned, source=C)
        merged = turned.flatten(-2)
        self.show("C as n × d, heads merged", merged, source=turned)
        return merged

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


def combine(layer: LayerWeights) -> Combined:
    """W_q, W_k and W_v side by side in a tensor of our own, and their biases."""
    W_qkv = torch.cat((layer.W_q, layer.W_k, layer.W_v), 1)
    if layer.b_q is None or layer.b_k is None or layer.b_v is None:
        return W_qkv, None
    return W_qkv, torch.cat((layer.b_q, layer.b_k, layer.b_v))


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
