"""Rung 5: one matrix for queries, keys and values, `Q K V = T W_qkv` split in three views.

Letters: n tokens, d width, h heads, h_kv key/value heads, d/h
size of a head, F hidden size, v vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from llmcli.ladder import letters
from llmcli.ladder.matrices import activate
from llmcli.ladder.rung import Rung, Show, silent
from llmcli.ladder.weights import LayerWeights, Weights
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.norm.config import NormConfig

Turns = tuple[Tensor, Tensor]  # cos and sin
Combined = tuple[Tensor, Tensor | None]  # W_qkv `[d, (h + 2 h_kv)·d/h]` and b_qkv


class CombinedQKV(Rung):
    """The forward pass with one product for the queries, keys and values of all heads."""

    number: ClassVar[int] = 5
    name: ClassVar[str] = "combined"
    title: ClassVar[str] = "combined QKV: one product instead of three"

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
        self.enter("the input")
        self.show("X = W_E[ids]" + ("" if of.W_P is None else " + W_P[positions]"), X, "n × d")
        count = len(of.layers) if until is None else until + 1
        blocks = zip(of.layers[:count], self.combined[:count], strict=True)
        for i, (layer, combined) in enumerate(blocks):
            self.enter_block(i)
            X = self._block(layer, combined, X)
        if until is not None:
            return X
        self.leave_blocks(X, "n × d")
        H = self._norm("H′ = norm(H)", X, of.ln_w, of.ln_b, self.config.final_norm, "n × d")
        axes = "(n × d)(d × v) = n × v"
        return self._product("logits = H′ W_head", H, of.W_head, of.b_head, axes, self.tied)

    def _block(self, layer: LayerWeights, combined: Combined, X: Tensor) -> Tensor:
        config = layer.config
        rows = "n × d"
        T1 = self._norm("T¹ = norm(X)", X, layer.ln1_w, layer.ln1_b, config.ln1, rows)
        T2 = self._attention(layer, combined, T1)
        T3 = T2 + X
        self.show("T³ = T² + X", T3, rows, note=letters.FIRST_RESIDUAL)
        T4 = self._norm("T⁴ = norm(T³)", T3, layer.ln2_w, layer.ln2_b, config.ln2, rows)
        T5 = self._feed_forward(layer, T4)
        H = T5 + T3
        self.show("H = T⁵ + T³", H, rows, note=letters.SECOND_RESIDUAL)
        return H

    def _attention(self, layer: LayerWeights, combined: Combined, T: Tensor) -> Tensor:
        """`softmax(Q Kᵀ / √(d/h) + M) V` of all heads at once, merged, through W_o."""
        mixer, axes = layer.config.mixer, self.letters
        W_qkv, b_qkv = combined
        size = f"d × {axes.QKV}"
        self.show("W_qkv = W_q ⊕ W_k ⊕ W_v, as the model is built", W_qkv, size)
        product = f"(n × d)({size}) = n × {axes.QKV}"
        QKV = self._product("QKV = T¹ W_qkv", T, W_qkv, b_qkv, product)
        shared = mixer.kv_heads * mixer.value_dim
        Q, K, V = QKV.split_with_sizes(
            [mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, shared], -1
        )
        self.show("Q, the first columns", Q, f"n × {axes.Q}", source=QKV)
        self.show("K, the next columns", K, f"n × {axes.K}", source=QKV)
        self.show("V, the last columns", V, f"n × {axes.V}", source=QKV)
        turns = self._turns(layer, len(T))
        Q, K = self._split("Q", Q, mixer.heads), self._split("K", K, mixer.kv_heads, axes.h_kv)
        V = self._split("V", V, mixer.kv_heads, axes.h_kv)
        Q = self._placed("Q", Q, layer, turns, "h × n × d/h")
        K = self._placed("K", K, layer, turns, f"{axes.h_kv} × n × d/h")
        C = self._merge(self._attend(mixer, Q, K, V))
        product = f"(n × {axes.C})({axes.C} × d) = n × d"
        return self._product("T² = C W_o", C, layer.W_o, layer.b_o, product)

    def _attend(self, mixer: AttentionConfig, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        """`softmax(Q Kᵀ / √(d/h) + M) V`, the heads being the leading axis of all."""
        axes, h = self.letters, "h"
        q, k = axes.placed("Q"), axes.placed("K")
        if mixer.kv_heads < mixer.heads:
            K, V = self._repeated(k, K, V, mixer.heads // mixer.kv_heads)
        KT = K.transpose(-2, -1)
        self.show(f"{k}ᵀ", KT, f"{h} × d/h × n", source=K)
        S = Q @ KT * mixer.scale
        product, note = f"{h} × (n × d/h)(d/h × n) = {h} × n × n", letters.scale(mixer)
        self.show(f"S = {axes.scaled(f'{q} {k}ᵀ')}", S, product, note=note)
        M = mask(Q.shape[-2], mixer.window).to(Q)
        self.show("M, the mask", M, "n × n")
        S = S + M
        self.show("S + M", S, f"{h} × n × n")
        A = softmax(S)
        self.show("A = softmax(S + M)", A, f"{h} × n × n")
        C = A @ V
        self.show("C = A V", C, f"{h} × (n × n)(n × {axes.dv}) = {h} × n × {axes.dv}")
        return C

    def _split(self, name: str, X: Tensor, heads: int, h: str = "h") -> Tensor:
        """`[n, h·d/h]` seen as `[n, h, d/h]`, and that as `[h, n, d/h]`: two views."""
        size = self.letters.dv if name.startswith("V") else "d/h"
        apart, axes = X.view(len(X), heads, -1), f"n × {h} × {size}"
        self.show(f"{name} as {axes}", apart, axes, source=X)
        turned, axes = apart.transpose(-3, -2), f"{h} × n × {size}"
        self.show(f"{name} as {axes}", turned, axes, source=apart)
        return turned

    def _repeated(self, k: str, K: Tensor, V: Tensor, times: int) -> tuple[Tensor, Tensor]:
        """K and V once for every head that reads them, `[h, n, d/h]`: copies."""
        many_K, many_V = (X.repeat_interleave(times, 0) for X in (K, V))
        axes = "h × n × d/h"
        self.show(f"{k} as {axes}, for every head", many_K, axes, source=K)
        axes = f"h × n × {self.letters.dv}"
        self.show(f"V as {axes}, for every head", many_V, axes, source=V)
        return many_K, many_V

    def _merge(self, C: Tensor) -> Tensor:
        """`[h, n, d/h]` back to `[n, h·d/h]`: the transpose is a view, the rows must be copied."""
        turned, axes = C.transpose(-3, -2), f"n × h × {self.letters.dv}"
        self.show(f"C as {axes}", turned, axes, source=C)
        merged, axes = turned.flatten(-2), f"n × {self.letters.C}"
        self.show(f"C as {axes}, heads merged", merged, axes, source=turned)
        return merged

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
