"""Rung 7: a batch, every tensor of rung 6 one rank higher: `b × n × d`.

Letters: b sequences of equal length, n tokens so far of each, d width, h heads, k key/value heads
(k = h where each head has its own), d/h size of a head, F hidden size, v vocabulary. In the
formulas an index n marks what has one row of each sequence only.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.config import Activation, AttentionConfig, NormConfig, RopeConfig
from llmcli.ladder.rung import Rung, Show, silent
from llmcli.ladder.weights import LayerWeights, Weights

Turns = tuple[Tensor, Tensor]  # cos and sin
Combined = tuple[Tensor, Tensor | None]  # W_qkv `[d, (h + k + k)·d/h]` and b_qkv


class Cache:
    """Keys (rotated) and values of one layer, `[b, k, C, d/h]`: C slots for each sequence.

    Slots are allocated ahead, twice as many each time they run out.
    """

    def __init__(self, layer: LayerWeights, b: int) -> None:
        mixer = layer.config.mixer
        self.keys = layer.W_k.new_zeros(b, mixer.kv_heads, 0, mixer.head_dim)
        self.values = layer.W_v.new_zeros(b, mixer.kv_heads, 0, mixer.value_dim)

    def write(self, K: Tensor, V: Tensor, start: int) -> None:
        """Rows of K and V, `[b, k, rows, d/h]`, into the slots from `start` on."""
        slots, stop = self.keys.shape[-2], start + K.shape[-2]
        if stop > slots:
            more = (0, 0, 0, max(stop, 2 * slots, 32) - slots)
            self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)
        self.keys[..., start:stop, :] = K
        self.values[..., start:stop, :] = V


class Batch(Rung):
    """The forward pass of several sequences at once, prompt and cached rows alike."""

    number: ClassVar[int] = 7
    name: ClassVar[str] = "batch"
    title: ClassVar[str] = "a batch: several sequences at once, one rank higher"
    change: ClassVar[tuple[str, str]] = (
        "n × d activations of one sequence; h × n × d/h",
        "b × n × d activations of b sequences; b × h × n × d/h",
    )
    idea: ClassVar[str] = (
        "Sequences do not see each other, so b of them are one more leading dimension that the "
        "library loops over, like the heads; the weights have none. Each number is computed as "
        "before. What is saved is reading: a weight fetched from memory serves b rows, so the "
        "GEMVs of a new token become products of b rows. Only the cache grows with b. Here the "
        "sequences have equal lengths; shorter ones would be padded, and then the last row needs "
        "its mask back."
    )
    batched: ClassVar[bool] = True

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self.combined = [combine(layer) for layer in weights.layers]
        self.caches: list[Cache] = []
        self.length = 0
        self.positions = torch.arange(0)  # of the rows that are being read
        self.turned: dict[RopeConfig | None, Turns | None] = {}  # their cos and sin
        self.row, self.n = "", "n"  # `_n`, `1` in the formulas of a last row

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[b, n, v]` of `[b, n]` ids, the cache filled; `until=i`: rows `[b, n, d]`."""
        self.caches = [Cache(layer, len(ids)) for layer in self.weights.layers]
        self.length, self.row, self.n = 0, "", "n"
        rows = self._read(ids, until)
        if until is not None:
            self.caches = []  # not filled by all layers: nothing to extend
        return rows

    @torch.inference_mode()
    def extend(self, id: Tensor) -> Tensor:
        """Reads one token more of each sequence, `[b]`: their logits `[b, v]`."""
        self.row, self.n = "_n", "1"
        return self._read(id.unsqueeze(1), None)[:, -1]

    def _read(self, ids: Tensor, until: int | None) -> Tensor:
        """The rows of `ids` `[b, rows]`, which come after the `length` tokens in the cache."""
        of = self.weights
        self.positions = torch.arange(self.length, self.length + ids.shape[1])
        self.turned = {}
        X = of.W_E[ids]
        if of.W_P is not None:
            X = X + of.W_P[self.positions]
        self.show("X = W_E[ids]" + ("" if of.W_P is None else " + W_P[positions]"), X)
        count = len(of.layers) if until is None else until + 1
        blocks = list(zip(of.layers, self.combined, self.caches, strict=True))
        for layer, combined, cache in blocks[:count]:
            X = self._block(layer, combined, cache, X)
        self.length += ids.shape[1]
        if until is not None:
            return X
        T = self._norm("T = norm(H)", X, of.ln_w, of.ln_b, self.config.final_norm)
        return self._product("logits = T W_head", T, of.W_head, of.b_head)

    def _block(self, layer: LayerWeights, combined: Combined, cache: Cache, X: Tensor) -> Tensor:
        config = layer.config
        T1 = self._norm("T = T¹ = norm(X)", X, layer.ln1_w, layer.ln1_b, config.ln1)
        T2 = self._attention(layer, combined, cache, T1)
        T3 = T2 + X
        self.show("T³ = T² + X", T3)
        T4 = self._norm("T⁴ = norm(T³)", T3, layer.ln2_w, layer.ln2_b, config.ln2)
        T5 = self._feed_forward(layer, T4)
        H = T5 + T3
        self.show("H = T⁵ + T³", H)
        return H

    def _attention(self, layer: LayerWeights, W: Combined, cache: Cache, T: Tensor) -> Tensor:
        """`softmax(Q_n Kᵀ / √(d/h)) V` for the rows of T, K and V being all rows so far."""
        mixer = layer.config.mixer
        n_ = self.row
        W_qkv, b_qkv = W
        QKV = self._product(f"QKV{n_} = T{n_} W_qkv", T, W_qkv, b_qkv)
        shared = mixer.kv_heads * mixer.value_dim
        Q, K, V = QKV.split_with_sizes(
            [mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, shared], -1
        )
        k = "k" if mixer.kv_heads < mixer.heads else "h"  # the letter of their number
        turns = self._turns(layer)
        Q = self._split(f"Q{n_}", Q, mixer.heads)
        Q = self._placed(f"Q{n_}", Q, layer, layer.q_norm, turns)
        K = self._split(f"K{n_}", K, mixer.kv_heads, k)
        K = self._placed(f"K{n_}", K, layer, layer.k_norm, turns)
        V = self._split(f"V{n_}", V, mixer.kv_heads, k)
        cache.write(K, V, self.length)
        K, V = self._kept(cache, T.shape[1], mixer.window)
        C = self._merge(self._attend(Q, K, V, mixer))
        return self._product(f"T² = attention(T¹) = C{n_} W_o", C, layer.W_o, layer.b_o)

    def _kept(self, cache: Cache, rows: int, window: int | None) -> tuple[Tensor, Tensor]:
        """The slots of K and V that the new rows read, as views: of one row, its window only."""
        stop = self.length + rows
        first = 0 if window is None or rows > 1 else max(0, stop - window)
        K, V = cache.keys[..., first:stop, :], cache.values[..., first:stop, :]
        self.show(f"K: the cache's slots so far{self.row and ', K_n the last'}", K, cache.keys)
        return K, V

    def _attend(self, Q: Tensor, K: Tensor, V: Tensor, mixer: AttentionConfig) -> Tensor:
        """`softmax(Q_n Kᵀ / √(d/h)) V`, with the mask where there is more than one row."""
        n_ = self.row
        rows = Q.shape[-2]
        if mixer.kv_heads < mixer.heads:
            Q, K, V = self._grouped(Q, K, V)
        KT = K.transpose(-2, -1)
        self.show(f"Kᵀ{n_ and ' of all rows'}", KT, source=K)
        scores = Q @ KT
        self.show(f"scores{n_} = Q{n_} Kᵀ", scores)
        if rows > 1:
            M = mask(rows, mixer.window).to(Q)
            self.show("mask M", M)
            scores = scores + M
            self.show("scores + M", scores)
        scores = scores * mixer.scale
        usual = math.isclose(mixer.scale, mixer.head_dim**-0.5)
        self.show(f"scores{n_} / √(d/h)" if usual else f"scores{n_} · scale", scores)
        A = softmax(scores)
        self.show(f"A{n_} = softmax(scores{n_})", A)
        C = A @ V
        self.show(f"C{n_} = A{n_} V", C)
        return C

    def _split(self, name: str, X: Tensor, heads: int, h: str = "h") -> Tensor:
        """`[b, n, h·d/h]` seen as `[b, n, h, d/h]`, and that as `[b, h, n, d/h]`: two views."""
        apart = X.view(*X.shape[:2], heads, -1)
        self.show(f"{name} as b × {self.n} × {h} × d/h", apart, source=X)
        turned = apart.transpose(-3, -2)
        self.show(f"{name} as b × {h} × {self.n} × d/h", turned, source=apart)
        return turned

    def _grouped(self, Q: Tensor, K: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Several heads per key/value head: `[b, k, h/k, n, d/h]`, K and V seen h/k times."""
        group = Q.shape[1] // K.shape[1]
        grouped = Q.view(*K.shape[:2], group, *Q.shape[2:])
        self.show(f"Q{self.row} as b × k × h/k × {self.n} × d/h", grouped, source=Q)
        shared_K, shared_V = (X.unsqueeze(2).expand(-1, -1, group, -1, -1) for X in (K, V))
        self.show("K as b × k × h/k × n × d/h", shared_K, source=K)
        return grouped, shared_K, shared_V

    def _merge(self, C: Tensor) -> Tensor:
        """`[b, h, n, d/h]` back to `[b, n, h·d/h]`: a view, then a copy."""
        if C.ndim == 5:
            C = C.flatten(1, 2)
        turned = C.transpose(-3, -2)
        self.show(f"C{self.row} as b × {self.n} × h × d/h", turned, source=C)
        merged = turned.flatten(-2)
        self.show(f"C{self.row} as b × {self.n} × d, heads merged", merged, source=turned)
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

    def _turns(self, layer: LayerWeights) -> Turns | None:
        """cos and sin of the new rows' positions, `[rows, R/2]`; None where nothing rotates."""
        rope = layer.config.mixer.rope
        if rope not in self.turned:
            self.turned[rope] = None
            angles = self.weights.angles(layer, int(self.positions[-1]) + 1)
            if angles is not None:
                pairs = torch.tensor(angles[0], dtype=torch.float64)
                turns = torch.outer(self.positions.double(), pairs)
                cos, sin = turns.cos() * angles[1], turns.sin() * angles[1]
                self.turned[rope] = cos.to(layer.W_q), sin.to(layer.W_q)
        return self.turned[rope]

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
