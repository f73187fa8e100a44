"""Rung 7: a batch, every tensor of rung 6 one rank higher: `b × n × d`.

Letters: b sequences of equal length, n tokens so far of each, d width, h heads, h_kv of keys and
values, d/h size of a head, F hidden size, v vocabulary. In the formulas an index n marks what has
one row of each sequence only.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from llmcli.ladder import letters
from llmcli.ladder.cache import Cache, Combined, combine
from llmcli.ladder.matrices import activate, mask, softmax
from llmcli.ladder.rung import Rung, Show, silent
from llmcli.ladder.weights import LayerWeights, Weights
from llmcli.parts.attention.config import AttentionConfig, RopeConfig
from llmcli.parts.norm.config import NormConfig

Turns = tuple[Tensor, Tensor]  # cos and sin


class Batch(Rung):
    """The forward pass of several sequences at once, prompt and cached rows alike."""

    number: ClassVar[int] = 7
    name: ClassVar[str] = "batch"
    title: ClassVar[str] = "a batch: several sequences at once, one rank higher"
    batched: ClassVar[bool] = True

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self.combined = [combine(layer) for layer in weights.layers]
        self.caches: list[Cache] = []
        self.length = 0
        self.positions = torch.arange(0)  # of the rows that are being read
        self.turned: dict[RopeConfig | None, Turns | None] = {}  # their cos and sin
        self.row, self.n, self.keys = "", "n", "n"  # `_n`, `1`, `n` or `W` for a last row

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
        n_, rows = self.row, f"b × {self.n} × d"
        self.enter("the input", n_)
        self.show(f"X{n_} = W_E[ids]" + ("" if of.W_P is None else " + W_P[positions]"), X, rows)
        count = len(of.layers) if until is None else until + 1
        blocks = list(zip(of.layers, self.combined, self.caches, strict=True))
        for i, (layer, combined, cache) in enumerate(blocks[:count]):
            self.enter_block(i, n_)
            X = self._block(layer, combined, cache, X)
        self.length += ids.shape[1]
        if until is not None:
            return X
        self.leave_blocks(X, rows, n_)
        final = self.config.final_norm
        H = self._norm(f"H′{n_} = norm(H{n_})", X, of.ln_w, of.ln_b, final, rows)
        axes = f"({rows})(d × v) = {rows[:-1]}v"
        return self._product(f"logits = H′{n_} W_head", H, of.W_head, of.b_head, axes, self.tied)

    def _block(self, layer: LayerWeights, combined: Combined, cache: Cache, X: Tensor) -> Tensor:
        config = layer.config
        n_, rows = self.row, f"b × {self.n} × d"
        T1 = self._norm(f"T¹{n_} = norm(X{n_})", X, layer.ln1_w, layer.ln1_b, config.ln1, rows)
        T2 = self._attention(layer, combined, cache, T1)
        T3 = T2 + X
        self.show(f"T³{n_} = T²{n_} + X{n_}", T3, rows, note=letters.FIRST_RESIDUAL)
        T4 = self._norm(f"T⁴{n_} = norm(T³{n_})", T3, layer.ln2_w, layer.ln2_b, config.ln2, rows)
        T5 = self._feed_forward(layer, T4)
        H = T5 + T3
        self.show(f"H{n_} = T⁵{n_} + T³{n_}", H, rows, note=letters.SECOND_RESIDUAL)
        return H

    def _attention(self, layer: LayerWeights, W: Combined, cache: Cache, T: Tensor) -> Tensor:
        """`softmax(Q_n Kᵀ / √(d/h)) V` for the rows of T, K and V being all rows so far."""
        mixer, axes = layer.config.mixer, self.letters
        n_, rows, (W_qkv, b_qkv) = self.row, f"b × {self.n}", W
        product = f"({rows} × d)(d × {axes.QKV}) = {rows} × {axes.QKV}"
        QKV = self._product(f"QKV{n_} = T¹{n_} W_qkv", T, W_qkv, b_qkv, product)
        shared = mixer.kv_heads * mixer.value_dim
        Q, K, V = QKV.split_with_sizes(
            [mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, shared], -1
        )
        self.show(f"Q{n_}, the first columns", Q, f"{rows} × {axes.Q}", source=QKV)
        self.show(f"K{n_}, the next columns", K, f"{rows} × {axes.K}", source=QKV)
        self.show(f"V{n_}, the last columns", V, f"{rows} × {axes.V}", source=QKV)
        turns, k_axes = self._turns(layer), f"b × {axes.h_kv} × {self.n} × d/h"
        Q = self._split(f"Q{n_}", Q, mixer.heads)
        K = self._split(f"K{n_}", K, mixer.kv_heads, axes.h_kv)
        V = self._split(f"V{n_}", V, mixer.kv_heads, axes.h_kv)
        Q = self._placed(f"Q{n_}", Q, layer, turns, f"b × h × {self.n} × d/h")
        K = self._placed(f"K{n_}", K, layer, turns, k_axes)
        cache.write(K, V, self.length)
        K, V = self._kept(cache, T.shape[1], mixer.window)
        C = self._merge(self._attend(mixer, Q, K, V))
        product = f"({rows} × {axes.C})({axes.C} × d) = {rows} × d"
        return self._product(f"T²{n_} = C{n_} W_o", C, layer.W_o, layer.b_o, product)

    def _kept(self, cache: Cache, rows: int, window: int | None) -> tuple[Tensor, Tensor]:
        """The slots of K and V that the new rows read, as views: of one row, its window only."""
        stop = self.length + rows
        first = 0 if window is None or rows > 1 else max(0, stop - window)
        K, V = cache.keys[..., first:stop, :], cache.values[..., first:stop, :]
        note = f"rows {first} to {stop - 2} from the cache, row {stop - 1} new" if self.row else ""
        axes, words = self.letters, "of all tokens so far, in the cache"
        self.keys = "W" if first else "n"
        size = f"b × {axes.h_kv} × {self.keys} × "
        self.show(f"{axes.placed('K')}: {words}", K, size + "d/h", source=cache.keys, note=note)
        self.show(f"V: {words}", V, size + axes.dv, source=cache.values, note=note)
        return K, V

    def _attend(self, mixer: AttentionConfig, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        """`softmax(Q_n Kᵀ / √(d/h)) V`, with the mask where there is more than one row."""
        axes, n_, n, s, h = self.letters, self.row, self.n, self.keys, "b × h"
        q, k = f"{axes.placed('Q')}{n_}", axes.placed("K")
        if mixer.kv_heads < mixer.heads:
            K, V = self._repeated(k, K, V, mixer.heads // mixer.kv_heads)
        KT = K.transpose(-2, -1)
        self.show(f"{k}ᵀ", KT, f"{h} × d/h × {s}", source=K)
        S, of = Q @ KT * mixer.scale, f"S{n_}"
        product, note = f"{h} × ({n} × d/h)(d/h × {s}) = {h} × {n} × {s}", letters.scale(mixer)
        self.show(f"S{n_} = {axes.scaled(f'{q} {k}ᵀ')}", S, product, note=note)
        if not n_:
            M = mask(Q.shape[-2], mixer.window).to(Q)
            self.show("M, the mask", M, "n × n")
            S, of = S + M, "S + M"
            self.show(of, S, f"{h} × n × n")
        A = softmax(S)
        self.show(f"A{n_} = softmax({of})", A, f"{h} × {n} × {s}")
        C = A @ V
        product = f"{h} × ({n} × {s})({s} × {axes.dv}) = {h} × {n} × {axes.dv}"
        self.show(f"C{n_} = A{n_} V", C, product)
        return C

    def _split(self, name: str, X: Tensor, heads: int, h: str = "h") -> Tensor:
        """`[b, n, h·d/h]` seen as `[b, n, h, d/h]`, and that as `[b, h, n, d/h]`: two views."""
        size = self.letters.dv if name.startswith("V") else "d/h"
        apart, axes = X.view(*X.shape[:2], heads, -1), f"b × {self.n} × {h} × {size}"
        self.show(f"{name} as {axes}", apart, axes, source=X)
        turned, axes = apart.transpose(-3, -2), f"b × {h} × {self.n} × {size}"
        self.show(f"{name} as {axes}", turned, axes, source=apart)
        return turned

    def _repeated(self, k: str, K: Tensor, V: Tensor, times: int) -> tuple[Tensor, Tensor]:
        """K and V once for every head that reads them, `[b, h, n, d/h]`: copies."""
        many_K, many_V = (X.repeat_interleave(times, 1) for X in (K, V))
        axes = f"b × h × {self.keys} × d/h"
        self.show(f"{k} as {axes}, for every head", many_K, axes, source=K)
        axes = f"b × h × {self.keys} × {self.letters.dv}"
        self.show(f"V as {axes}, for every head", many_V, axes, source=V)
        return many_K, many_V

    def _merge(self, C: Tensor) -> Tensor:
        """`[b, h, n, d/h]` back to `[b, n, h·d/h]`: a view, then a copy."""
        turned, axes = C.transpose(-3, -2), f"b × {self.n} × h × {self.letters.dv}"
        self.show(f"C{self.row} as {axes}", turned, axes, source=C)
        merged, axes = turned.flatten(-2), f"b × {self.n} × {self.letters.C}"
        self.show(f"C{self.row} as {axes}, heads merged", merged, axes, source=turned)
        return merged

    def _placed(
        self, name: str, X: Tensor, layer: LayerWeights, turns: Turns | None, axes: str
    ) -> Tensor:
        """Queries or keys normalized and rotated by position, where the model does that."""
        qk_norm = layer.config.mixer.qk_norm
        weight = layer.q_norm if name.startswith("Q") else layer.k_norm
        if weight is not None and qk_norm is not None:
            X = self._norm(
                f"{name[0]}_norm{self.row} = norm({name})", X, weight, None, qk_norm, axes
            )
            name = f"{name[0]}_norm{self.row}"
        if turns is None:
            return X
        cos, sin = turns
        half = cos.shape[-1]
        a, b, rest = X[..., :half], X[..., half : 2 * half], X[..., 2 * half :]
        X = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
        self.show(f"{name[0]}_rot{self.row} = R(position) {name}", X, axes)
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
        kind, gated = layer.config.ffn.activation, layer.W_gate is not None
        n_, rows, F = self.row, f"b × {self.n}", self.letters.F
        wide = f"({rows} × d)(d × {F}) = {rows} × {F}"
        up = self._product(f"U{n_} = T⁴{n_} W_up", T, layer.W_up, layer.b_up, wide)
        hidden = activate(kind, up)
        if layer.W_gate is not None:
            gate = self._product(f"G{n_} = T⁴{n_} W_gate", T, layer.W_gate, layer.b_gate, wide)
            hidden = activate(kind, gate) * up
        note = f"Layer = Activation(X W + B), {F} wide"
        formula = letters.layer_formula(kind, gated=gated, row=n_)
        self.show(formula, hidden, f"{rows} × {F}", note=note)
        narrow = f"({rows} × {F})({F} × d) = {rows} × d"
        return self._product(f"T⁵{n_} = L{n_} W_down", hidden, layer.W_down, layer.b_down, narrow)

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
