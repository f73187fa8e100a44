"""Rung 4: the heads are a dimension, `n × d` seen as `n × h × d/h` seen as `h × n × d/h`.

The weights of all heads lie side by side in one matrix, made when the model is built, and the
loop over the heads is gone. Letters: n tokens, d width, h heads, k key/value heads (k = h where
each head has its own), d/h size of a head, F hidden size, v vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from llmcli.config import Activation, NormConfig
from llmcli.ladder.rung import Rung, Show, silent
from llmcli.ladder.weights import LayerWeights, Weights

Turns = tuple[Tensor, Tensor]  # cos and sin


@dataclass(frozen=True)
class Heads:
    """The heads' weights side by side: `W_q` `[d, h·d/h]`, `W_k` and `W_v` `[d, k·d/h]`."""

    W_q: Tensor
    b_q: Tensor | None
    W_k: Tensor
    b_k: Tensor | None
    W_v: Tensor
    b_v: Tensor | None


class HeadsAsDimension(Rung):
    """The forward pass on tensors with an axis of heads."""

    number: ClassVar[int] = 4
    name: ClassVar[str] = "heads"
    title: ClassVar[str] = "heads are a dimension: all of them in one batched product"
    change: ClassVar[tuple[str, str]] = (
        "for every head: Q_h = T W_q,h; softmax(mask(Q_h K_hᵀ) / √(d/h)) V_h",
        "Q = T (W_q¹ ⊕ … ⊕ W_qʰ), n × d → n × h × d/h → h × n × d/h; Q Kᵀ for all heads",
    )
    idea: ClassVar[str] = (
        "A product works column by column, so weights concatenated by columns give the heads' "
        "queries side by side: one product instead of h. Seeing n × d as n × h × d/h and that as "
        "h × n × d/h moves no number, only the strides change; a library loops over the leading "
        "dimension by itself. Merging the heads back does move them: a row of n × d wants numbers "
        "of every head side by side, which h × n × d/h has far apart, so that is a copy. Where "
        "several heads share a key and a value, these are seen h/k times without being repeated "
        "(the library's product may repeat them inside). One head's output is n × d/h, neither "
        "n × n/h nor n × d, as it is sometimes given."
    )

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self.heads = [concatenate(layer) for layer in weights.layers]

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[n, v]`; with `until=i` the rows `[n, d]` after layer i."""
        of = self.weights
        X = of.W_E[ids]
        if of.W_P is not None:
            X = X + of.W_P[torch.arange(len(ids))]
        self.show("X = W_E[ids]" + ("" if of.W_P is None else " + W_P[positions]"), X)
        count = len(of.layers) if until is None else until + 1
        for layer, heads in zip(of.layers[:count], self.heads[:count], strict=True):
            X = self._block(layer, heads, X)
        if until is not None:
            return X
        T = self._norm("T = norm(H)", X, of.ln_w, of.ln_b, self.config.final_norm)
        return self._product("logits = T W_head", T, of.W_head, of.b_head)

    def _block(self, layer: LayerWeights, heads: Heads, X: Tensor) -> Tensor:
        config = layer.config
        T1 = self._norm("T = T¹ = norm(X)", X, layer.ln1_w, layer.ln1_b, config.ln1)
        T2 = self._attention(layer, heads, T1)
        T3 = T2 + X
        self.show("T³ = T² + X", T3)
        T4 = self._norm("T⁴ = norm(T³)", T3, layer.ln2_w, layer.ln2_b, config.ln2)
        T5 = self._feed_forward(layer, T4)
        H = T5 + T3
        self.show("H = T⁵ + T³", H)
        return H

    def _attention(self, layer: LayerWeights, heads: Heads, T: Tensor) -> Tensor:
        """`softmax(mask(Q Kᵀ) / √(d/h)) V` of all heads at once, merged, through W_o."""
        mixer = layer.config.mixer
        self.show("W_q = W_q¹ ⊕ … ⊕ W_qʰ, as the model is built", heads.W_q, source=layer.W_q)
        Q = self._product("Q = T W_q", T, heads.W_q, heads.b_q)
        K = self._product("K = T W_k", T, heads.W_k, heads.b_k)
        V = self._product("V = T W_v", T, heads.W_v, heads.b_v)
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


def concatenate(layer: LayerWeights) -> Heads:
    """The weights of the single heads, d/h columns each, put side by side in tensors of our own."""

    def bias(b: Tensor | None, heads: int) -> Tensor | None:
        return None if b is None else torch.cat(b.chunk(heads))

    heads, kv_heads = layer.config.mixer.heads, layer.config.mixer.kv_heads
    return Heads(
        W_q=torch.cat(layer.W_q.chunk(heads, 1), 1),
        b_q=bias(layer.b_q, heads),
        W_k=torch.cat(layer.W_k.chunk(kv_heads, 1), 1),
        b_k=bias(layer.b_k, kv_heads),
        W_v=torch.cat(layer.W_v.chunk(kv_heads, 1), 1),
        b_v=bias(layer.b_v, kv_heads),
    )


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
