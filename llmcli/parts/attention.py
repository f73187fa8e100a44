"""Softmax attention with its projections.

    x ── W_q|W_k|W_v ──┬─ q ─(norm)─ rope ─┐
                       ├─ k ─(norm)─ rope ─┼─ softmax(q kᵀ · scale + mask) v ── z ─(∘)─ W_o ──
                       ├─ v ─(norm)────────┘                                     │
                       └─(gate)── σ ─────────────────────────────────────────────┘

Values may be the keys before their norm, and both may be those of another layer.

Axes: B batch, T new tokens, S keys, D width, H heads, K key/value heads, d size of a head's
query and key, e of its value, G = H·e gates of a token. Query head h reads key/value head
h // (H/K).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmcli.config.attention import AttentionConfig
from llmcli.config.norm import HeadNorm, JoinedNorm
from llmcli.graph.parts.attention import entering, fused_kernel, mixed
from llmcli.nn.linear import Fused, Linear
from llmcli.nn.parameters import Parameters
from llmcli.nn.softmax_map import SoftmaxMap
from llmcli.nn.state import LayerState
from llmcli.nn.step import Step
from llmcli.ops import compiled, on_card
from llmcli.ops.activations import activation
from llmcli.ops.attention import attend, scores, visible_keys, weights
from llmcli.ops.compiled import cast
from llmcli.ops.elements import clip, gate
from llmcli.ops.norm import at_least_float32
from llmcli.ops.rope import rotate
from llmcli.parts.norm import Norm


class Attention(SoftmaxMap):
    """Multi-head, grouped-query or multi-query attention, with or without a window."""

    def __init__(self, config: AttentionConfig, name: str, parameters: Parameters) -> None:
        self.config: AttentionConfig = config
        self.name = name
        self.entering = entering(config, name)[:2]
        self.keys_of = self.entering[1].rpartition(".")[0]
        self.mixed = mixed(name, gated=config.gated)
        self._dtype, self._cache_dtype = parameters.dtype, parameters.cache_dtype
        self._fused = fused_kernel(name)
        self.qkv = Linear(parameters, name, *config.entering, bias=config.qkv_bias)
        self.out = Linear(parameters, name, "o", bias=config.out_bias)
        own = config.scores
        self.sinks_H = parameters.vector((f"{name}.sink",)) if own.sinks else None
        self.slopes_H: Tensor | None = None
        if own.slopes:
            wide = torch.float64 if parameters.dtype == torch.float64 else torch.float32
            self.slopes_H = torch.tensor(own.slopes, dtype=wide, device=parameters.device)
        self.q_norm = self.k_norm = self.v_norm = None
        # limits each part of the product, after its norm if it has one
        self._late_clip = None if config.qk_norm is None else config.clip
        if config.qk_norm is not None:
            self.q_norm = Norm(config.qk_norm, f"{name}.q_norm", parameters)
            if config.kv.layer is None:
                self.k_norm = Norm(config.qk_norm, f"{name}.k_norm", parameters)
        if config.kv.norm is not None and config.kv.layer is None:
            self.v_norm = Norm(config.kv.norm, f"{name}.v_norm", parameters)
        # whether a card has one kernel for all that is between the product and the scores
        norms = [one for one in (config.qk_norm, config.kv.norm) if one is not None]
        weighted = not isinstance(config.qk_norm, JoinedNorm) or config.qk_norm.weights
        fit = all(not one.bias and not isinstance(one, HeadNorm) for one in norms)
        self._in_one = weighted and fit and self._late_clip is None

    def fuses(self, x_BTD: Tensor) -> bool:
        """Whether kernels of a card support its products."""
        return self.qkv.fuses(x_BTD) and self.out.fuses(x_BTD)

    def __call__(
        self, x_BTD: Tensor, state: LayerState, step: Step, fused: Fused | None = None
    ) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32; appends keys and values to `state`."""
        config = self.config
        entered = self._entered(x_BTD, state, step, fused)
        if entered is not None:
            q_BHTd, k_BKSd, v_BKSe, gate_BTG = entered
        elif config.kv.layer is None:
            q_BHTd, k_BKSd, v_BKSe, gate_BTG = self._project(x_BTD, state, step, fused)
            if step.cached and k_BKSd is not state["k"]:
                step.write(k_BKSd, state["k"])
                step.write(v_BKSe, state["v"])
                k_BKSd, v_BKSe = state["k"], state["v"]
        else:
            q_BHTd, gate_BTG = self._queries(x_BTD, step, fused)
            k_BKSd, v_BKSe = step.shared_kv[self.keys_of]
        if config.kv.layer is None:
            step.share_kv(self.name, k_BKSd, v_BKSe)
        growth = None if entered is not None else config.scores.growth
        if growth is not None and compiled.takes(q_BHTd):
            q_BHTd = compiled.grow(q_BHTd, growth, step.starts_B)
        elif growth is not None:
            q_BHTd = self._grown(q_BHTd, step.positions)
        attended = self._attend if self._fused.runs(step.edits) else self._attend_in_rows
        z_BHTe = attended(q_BHTd, k_BKSd, v_BKSe, step)
        z_BTG = step.emit(f"{self.name}.z", z_BHTe).transpose(1, 2).flatten(2)
        if gate_BTG is not None:
            act_BTG = self._emit_gates("gate_act", activation("sigmoid")(gate_BTG), step)
            z_BTG = self._emit_gates("gated", gate(act_BTG, z_BTG), step)
        if fused is not None:
            return self.out.fused(z_BTG, onto=fused.onto, wide=True)
        return self.out.wide(z_BTG)

    def _attend(self, q_BHTd: Tensor, k_BKSd: Tensor, v_BKSe: Tensor, step: Step) -> Tensor:
        """The heads' results `[B, H, T, e]` of queries that `growth` has scaled, by a kernel."""
        own, slopes_H = self.config.scores, self.slopes_H
        how: dict[str, Any] = {"scale": own.scale, "cap": own.cap, "sinks_H": self.sinks_H}
        # only our kernels, which read float32 queries, support a cap, sinks and slopes (on a card
        # no slopes)
        unfused = own.cap is not None or own.sinks or slopes_H is not None
        on_a_card = step.cached and step.fixed and slopes_H is None
        if step.cached and compiled.attends(q_BHTd, k_BKSd, v_BKSe, unfused=unfused):
            rows = q_BHTd, k_BKSd, v_BKSe, step.starts_B
            return compiled.attend(*rows, window=own.window, slopes_H=slopes_H, **how)
        if on_a_card and on_card.attends(q_BHTd, k_BKSd, v_BKSe):
            k_BKSd, v_BKSe = k_BKSd[:, :, : step.keys], v_BKSe[:, :, : step.keys]
            return on_card.attend(q_BHTd, k_BKSd, v_BKSe, step.starts_B, window=own.window, **how)
        parts = [
            attend(
                q_BHTd[:, :, seen.rows],
                seen.of(k_BKSd),
                seen.of(v_BKSe),
                causal=seen.causal,
                mask=seen.mask,
                slopes_H=slopes_H,
                positions=None if slopes_H is None else step.positions[..., seen.rows],
                **how,
            )
            for seen in step.key_ranges(own.window)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _entered(
        self, x_BTD: Tensor, state: LayerState, step: Step, fused: Fused | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
        """Grown queries, the caches once written, and the gates, if a card's kernel does that."""
        config, own = self.config, self.config.kv.layer is None
        if not self._in_one or not step.fixed or not step.cached or step.observed:
            return None
        caches = (state["k"], state["v"]) if own else step.shared_kv[self.keys_of]
        if not on_card.enters(x_BTD, *caches):
            return None
        keys = config.kv_heads if own else 0
        heads = config.heads, keys, 0 if config.kv.equal else keys
        qkv_BTN = self._product(x_BTD, fused)
        norms = self.q_norm, self.k_norm, self.v_norm
        q_BHTd = on_card.enter(
            qkv_BTN, heads, caches, step.starts_B, dtype=self._dtype,
            norms=[None if one is None else one.fused for one in norms],
            tables_CR=None if config.rope is None else step.tables(config.rope),
            growth=config.scores.growth,
        )  # fmt: skip
        used = (heads[0] + heads[1]) * config.head_dim + heads[2] * config.value_dim
        return q_BHTd, *caches, self._gates(qkv_BTN[..., used:], step)

    def _project(
        self, x_BTD: Tensor, state: LayerState, step: Step, fused: Fused | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries `[B, H, T, d]`, keys `[B, K, T, d]` and values `[B, K, T, e]` of the scores.

        And the gates `[B, T, G]`, if any. Keys and values may be those of `state`, once written.

        Up to the q/k norm (if any) queries and keys are the N = H + K heads of one tensor, so that
        common ops run once. Keys and values are finally rounded to the cache's dtype.
        """
        config = self.config
        batch, tokens, _ = x_BTD.shape
        heads = config.heads + config.kv_heads
        qkv = self._product(x_BTD, fused)
        values = 0 if config.kv.equal else config.kv_heads * config.value_dim
        gates = config.gated * config.heads * config.value_dim
        qk, v, raw_BTG = qkv.split_with_sizes([heads * config.head_dim, values, gates], -1)
        qk_BTNd = qk.view(batch, tokens, heads, config.head_dim)
        v_BTKe = v.view(batch, tokens, -1, config.value_dim)
        del qkv, qk, v  # the normalized tensors are copies: free the product
        if self.q_norm is None and config.rope is None:
            q_BHTd, k_BKTd = self._enter(*self._split(qk_BTNd), step)
            v_BTKe = k_BKTd.transpose(1, 2) if config.kv.equal else v_BTKe
            v_BKTe = self._values(v_BTKe, step)
            return q_BHTd, k_BKTd, v_BKTe, self._gates(raw_BTG, step)
        qk_BTNd = self._emit_both("", qk_BTNd, step)
        v_BTKe = self._split(qk_BTNd)[1] if config.kv.equal else v_BTKe
        v_BKTe, gate_BTG = self._values(v_BTKe, step), self._gates(raw_BTG, step)
        if self.q_norm is None or self.k_norm is None:
            qk_BTNd = self._rotated(qk_BTNd, step)
            return *self._enter(*self._split(qk_BTNd), step), v_BKTe, gate_BTG
        q_BTHd, k_BTKd = self._split(qk_BTNd)
        del qk_BTNd
        q_BTHd, k_BTKd = self._normed(self.q_norm, q_BTHd), self._normed(self.k_norm, k_BTKd)
        if config.rope is not None:
            q_BTHd, k_BTKd = self._emit_each("_norm", q_BTHd, k_BTKd, step)
            q_BTHd, k_BTKd = self._rotated(q_BTHd, step), self._rotated(k_BTKd, step)
        return *self._enter(q_BTHd, k_BTKd, step), v_BKTe, gate_BTG

    def _product(self, x_BTD: Tensor, fused: Fused | None) -> Tensor:
        """All input projections side by side; wide if norms follow."""
        normed, limit = self.config.qk_norm is not None, self.config.clip
        wide = normed or limit is not None
        if fused is not None:
            product = self.qkv.fused(x_BTD, norm=fused.norm, wide=wide)
        else:
            product = self.qkv.wide(x_BTD) if wide else self.qkv(x_BTD)
        if normed or limit is None:
            return product
        return cast(clip(product, limit), self._dtype)

    def _clipped(self, x: Tensor) -> Tensor:
        """`x` limited to ±`clip`, if the whole product is not."""
        return x if self._late_clip is None else clip(x, self._late_clip)

    def _gates(self, raw_BTG: Tensor, step: Step) -> Tensor | None:
        """The emitted gates before their sigmoid, in the model's dtype."""
        if not self.config.gated:
            return None
        return self._emit_gates("gate", cast(self._clipped(raw_BTG), self._dtype), step)

    def _emit_gates(self, leaf: str, gate_BTG: Tensor, step: Step) -> Tensor:
        """Emit gates per head, `[B, H, T, e]`; returns the same tensor unless edited."""
        gate_BHTe = self._heads(gate_BTG.view(*gate_BTG.shape[:2], self.config.heads, -1))
        emitted = step.emit(f"{self.name}.{leaf}", gate_BHTe)
        return gate_BTG if emitted is gate_BHTe else emitted.transpose(1, 2).flatten(2)

    def _values(self, v_BTKe: Tensor, step: Step) -> Tensor:
        """Values for attention, `[B, K, T, e]`, in the cache's dtype."""
        name, shape = f"{self.name}.v", v_BTKe.shape
        if self.v_norm is not None:
            emitted_BKTe = step.emit(name, self._heads(v_BTKe))
            v_BTKe, name = self.v_norm(emitted_BKTe.transpose(1, 2)), f"{name}_norm"
        narrow = cast(self._clipped(v_BTKe.flatten(2)), self._cache_dtype)  # one row per token
        return step.emit(name, self._heads(narrow.view(shape)))

    def _queries(
        self, x_BTD: Tensor, step: Step, fused: Fused | None
    ) -> tuple[Tensor, Tensor | None]:
        """Only queries, `[B, H, T, d]`, as they enter the scores, and the gates, if any."""
        config, last = self.config, self.entering[0]
        q, *gates = self.qkv.split(self._product(x_BTD, fused))
        q_BHTd = self._heads(q.view(*x_BTD.shape[:2], config.heads, config.head_dim))
        q_BHTd = step.emit(f"{self.name}.q", q_BHTd)
        gate_BTG = self._gates(gates[0], step) if gates else None
        if self.q_norm is not None:
            normed = self._heads(self._normed(self.q_norm, q_BHTd.transpose(1, 2)))
            q_BHTd = step.emit(f"{self.name}.q_norm", normed)
        if config.rope is not None:
            q_BHTd = step.emit(last, self._heads(self._rotated(q_BHTd.transpose(1, 2), step)))
        return q_BHTd, gate_BTG

    def _split(self, qk_BTNd: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `[B, T, H, d]` and keys `[B, T, K, d]`, views of both."""
        sizes = [self.config.heads, self.config.kv_heads]
        q_BTHd, k_BTKd = qk_BTNd.split_with_sizes(sizes, 2)
        return q_BTHd, k_BTKd

    def _heads(self, x_BTNd: Tensor) -> Tensor:
        """A view `[B, N, T, d]`."""
        return x_BTNd.transpose(1, 2)

    def _normed(self, norm: Norm, x_BTNd: Tensor) -> Tensor:
        """Normalize each head, or all heads of a token together; clipped if configured."""
        if isinstance(self.config.qk_norm, JoinedNorm):
            return self._clipped(norm(x_BTNd.flatten(2)).view(x_BTNd.shape))
        return self._clipped(norm(x_BTNd))

    def _rotated(self, x_BTNd: Tensor, step: Step) -> Tensor:
        rope = self.config.rope
        assert rope is not None
        return step.rotate(x_BTNd, rope) if step.recorded else rotate(x_BTNd, *step.rope(rope))

    def _emit_both(self, suffix: str, qk_BTNd: Tensor, step: Step) -> Tensor:
        """Emit queries and keys; returns the same tensor unless one of them is edited."""
        if step.tap is None and not step.edits:  # computed together and not observed
            step.mark(f"{self.name}.q{suffix}")
            step.mark(f"{self.name}.k{suffix}")
            return qk_BTNd
        q_BTHd, k_BTKd = self._split(qk_BTNd)
        emitted = self._emit_each(suffix, q_BTHd, k_BTKd, step)
        if emitted[0] is q_BTHd and emitted[1] is k_BTKd:
            return qk_BTNd
        return torch.cat(emitted, 2)

    def _emit_each(
        self, suffix: str, q_BTHd: Tensor, k_BTKd: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Emit queries and keys; returns the same tensors unless edited."""
        found = []
        for symbol, x_BTNd in (("q", q_BTHd), ("k", k_BTKd)):
            x_BNTd = self._heads(x_BTNd)
            emitted = step.emit(f"{self.name}.{symbol}{suffix}", x_BNTd)
            found.append(x_BTNd if emitted is x_BNTd else emitted.transpose(1, 2))
        return found[0], found[1]

    def _enter(self, q_BTHd: Tensor, k_BTKd: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Queries and keys as they enter the scores; keys in the cache's dtype."""
        narrow = cast(k_BTKd.flatten(2), self._cache_dtype)  # one row per token
        k_BKTd = self._heads(narrow.view(k_BTKd.shape))
        q_BHTd = step.emit(self.entering[0], self._heads(q_BTHd))
        return q_BHTd, step.emit(self.entering[1], k_BKTd)

    def _attend_in_rows(self, q_BHTd: Tensor, k_BKSd: Tensor, v_BKSe: Tensor, step: Step) -> Tensor:
        """`attend` with stored and emitted scores and pattern, for a layer that edits them."""
        keys = slice(0, step.keys)
        visible = visible_keys(step.positions, step.keys, self.config.scores.window)
        if not step.uniform:
            visible = visible.unsqueeze(1)
        scores_BHTS = self._products(q_BHTd, k_BKSd[:, :, keys], visible, step.positions)
        scores_BHTS = step.emit(f"{self.name}.scores", scores_BHTS)
        pattern_BHTS = step.emit(f"{self.name}.pattern", self.weights(scores_BHTS))
        group = self.config.heads // self.config.kv_heads
        v_BHSe = at_least_float32(v_BKSe[:, :, keys]).repeat_interleave(group, dim=1)
        return (pattern_BHTS @ v_BHSe).to(q_BHTd.dtype)

    def _grown(self, q_BHtd: Tensor, positions: Tensor) -> Tensor:
        """Queries scaled by `growth` at positions `[t]` or `[B, t]`."""
        growth = self.config.scores.growth
        if growth is None:
            return q_BHtd
        wide = torch.promote_types(q_BHtd.dtype, torch.float32)
        at = positions + growth.first
        steps = torch.div(at, growth.original, rounding_mode="floor").to(wide)
        factor_t = 1 + growth.beta * torch.log1p(steps)
        factor_t = factor_t.unsqueeze(1) if factor_t.ndim > 1 else factor_t
        return (q_BHtd * factor_t.unsqueeze(-1)).to(q_BHtd.dtype)

    def scores(
        self, q_BHtd: Tensor, k_BKSd: Tensor, visible: Tensor, positions: Tensor,
        heads: slice | Sequence[int] = slice(None),
    ) -> Tensor:  # fmt: skip
        """Scores of queries as they were emitted, which `growth` has not scaled yet."""
        grown_BHtd = self._grown(at_least_float32(q_BHtd), positions)
        return self._products(grown_BHtd, k_BKSd, visible, positions, heads)

    def _products(
        self, q_BHtd: Tensor, k_BKSd: Tensor, visible: Tensor, positions: Tensor,
        heads: slice | Sequence[int] = slice(None),
    ) -> Tensor:  # fmt: skip
        """Scores of queries that `growth`, if any, has scaled."""
        own, slopes_H = self.config.scores, self.slopes_H
        how: dict[str, Any] = {"scale": own.scale, "cap": own.cap, "positions": positions}
        how["slopes_H"] = None if slopes_H is None else slopes_H[heads]
        return scores(q_BHtd, k_BKSd, visible, **how)

    def weights(self, scores_BHtS: Tensor, heads: slice | Sequence[int] = slice(None)) -> Tensor:
        """The softmax of scores `[…, H, t, S]` of `heads`, with their sinks."""
        return weights(scores_BHtS, None if self.sinks_H is None else self.sinks_H[heads])
