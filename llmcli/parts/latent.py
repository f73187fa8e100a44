"""Latent attention with its projections.

    x ──┬─ W_q_latent ─ norm ─┬─ W_q ──── q ────┐
        │                     └─ W_q_pe ─ rope ─┴─ q_rot ───┐
        ├─ W_kv_latent ─ norm ─ latent ─┬─ W_k ─ k ─┐       │
        │                               └─ W_v ─ v ─│───────┼─ softmax(q_rot k_rotᵀ · scale) v ─ W_o
        └─ W_k_pe ─ rope ───────────────────────────┴─ k_rot┘

The cache keeps the latent and the rotated key of every token, not keys and values.

Axes: B batch, T new tokens, S keys, C slots, D width, H heads, n content dimensions of a head's
query and key, r rotated ones, d = n + r, e of its value, c of the latent, k = c + r cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from llmcli.config.latent import LatentConfig
from llmcli.graph.parts.attention import fused_kernel
from llmcli.nn.linear import Linear
from llmcli.nn.parameters import Parameters
from llmcli.nn.softmax_map import SoftmaxMap
from llmcli.nn.state import LayerState
from llmcli.nn.step import Step
from llmcli.ops import compiled, on_card
from llmcli.ops.attention import attend, scores, visible_keys
from llmcli.ops.compiled import cast
from llmcli.ops.heads import join, to_columns, to_rows
from llmcli.ops.norm import at_least_float32
from llmcli.ops.product import batched_factor, batched_product
from llmcli.ops.rope import rotate
from llmcli.parts.norm import Norm


class LatentAttention(SoftmaxMap):
    """Latent attention: expands latents for a prompt, absorbs queries in a decoding step."""

    def __init__(self, config: LatentConfig, name: str, parameters: Parameters) -> None:
        self.config: LatentConfig = config
        self.name = name
        self.entering = (f"{name}.q_rot", f"{name}.k_rot")
        self.mixed = f"{name}.z"
        self._dtype, self._cache_dtype = parameters.dtype, parameters.cache_dtype
        self._fused = fused_kernel(name)
        self.q_down = self.q_norm = None
        if config.query_rank is not None:
            self.q_down = Linear(parameters, name, "q_latent", bias=config.bias)
            self.q_norm = Norm(config.norm, f"{name}.q_latent_norm", parameters)
        self.q_up = Linear(parameters, name, "q", "q_pe")
        self.kv_down = Linear(parameters, name, "kv_latent", "k_pe", bias=config.bias)
        self.kv_norm = Norm(config.norm, f"{name}.kv_latent_norm", parameters)
        self.kv_up = Linear(parameters, name, "k", "v")
        self.out = Linear(parameters, name, "o", bias=config.bias)

    def __call__(self, x_BTD: Tensor, state: LayerState, step: Step) -> Tensor:
        """`[B, T, D]` → `[B, T, D]` in at least float32; appends latents and keys to `state`."""
        q_BHTd = self._queries(x_BTD, step)
        latent_BTc, k_BTr = self._latents(x_BTD, step)
        if step.tap is not None:
            self._show(latent_BTc, k_BTr, step)
        latent_BSc, k_BSr = latent_BTc, k_BTr
        if step.cached:
            latent_BSc, k_BSr = state["latent"], state["k_pe"]
            step.write(latent_BTc.unsqueeze(1), latent_BSc.unsqueeze(1))
            step.write(k_BTr.unsqueeze(1), k_BSr.unsqueeze(1))
            latent_BSc, k_BSr = latent_BSc[:, : step.keys], k_BSr[:, : step.keys]
        if not self._fused.runs(step.edits):
            z_BHTe = self._attend_in_rows(q_BHTd, latent_BSc, k_BSr, step)
        elif self.config.absorbs(step.tokens, step.keys):
            joined = state.joined("latent") if step.cached else torch.cat((latent_BTc, k_BTr), -1)
            z_BHTe = self._absorbed(q_BHTd, joined, step)
        else:
            (seen,) = step.key_ranges(None)
            k_BHSn, v_BHSe = self._expanded(latent_BSc)
            rows, scale = (q_BHTd, self._joined(k_BHSn, k_BSr), v_BHSe), self.config.scores.scale
            z_BHTe = attend(*rows, scale=scale, causal=seen.causal, mask=seen.mask)
        z_BHTe = step.emit(f"{self.name}.z", z_BHTe)
        return self.out.wide(z_BHTe.transpose(1, 2).flatten(2))

    def _queries(self, x_BTD: Tensor, step: Step) -> Tensor:
        """Queries, content followed by rotated dimensions, `[B, H, T, d]`."""
        if self.q_down is not None and self.q_norm is not None:
            q_BTq = step.emit(f"{self.name}.q_latent", self.q_down.wide(x_BTD))
            x_BTD = step.emit(self.q_norm.name, self.q_norm(q_BTq))
        q_BHTn, q_BHTr = self._heads(self.q_up, x_BTD)
        q_BHTn = step.emit(f"{self.name}.q", q_BHTn)
        q_BHTr = self._rotated(step.emit(f"{self.name}.q_pe", q_BHTr).transpose(1, 2), step)
        q_BHTr = step.emit(f"{self.name}.q_pe_rot", q_BHTr.transpose(1, 2))
        q_BTHd = join(q_BHTn.transpose(1, 2), q_BHTr.transpose(1, 2))
        return step.emit(self.entering[0], q_BTHd.transpose(1, 2))

    def _latents(self, x_BTD: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Normalized latents `[B, T, c]` and rotated keys `[B, T, r]`, in the cache's dtype."""
        latent_BTc, k_BTr = self.kv_down.split(self.kv_down.wide(x_BTD))
        latent_BTc = self.kv_norm(step.emit(f"{self.name}.kv_latent", latent_BTc))
        latent_BTc = step.emit(self.kv_norm.name, cast(latent_BTc, self._cache_dtype))
        k_BTr = step.emit(f"{self.name}.k_pe", k_BTr.to(x_BTD.dtype))
        k_BTr = cast(self._rotated(k_BTr.unsqueeze(2), step).squeeze(2), self._cache_dtype)
        return latent_BTc, step.emit(f"{self.name}.k_pe_rot", k_BTr)

    def _heads(self, linear: Linear, x: Tensor) -> Iterator[Tensor]:
        """Yield the columns of each segment as heads, `[B, H, …, d]`."""
        for y in linear.split(linear(x)):
            yield y.view(*y.shape[:2], self.config.heads, -1).transpose(1, 2)

    def _rotated(self, x_BTNr: Tensor, step: Step) -> Tensor:
        """Apply RoPE at the tokens' positions."""
        rope = self.config.rope
        return step.rotate(x_BTNr, rope) if step.recorded else rotate(x_BTNr, *step.rope(rope))

    def _show(self, latent_BTc: Tensor, k_BTr: Tensor, step: Step) -> None:
        """Emit the new tokens' keys and values for a tap; they are not used otherwise."""
        k_BHTn, v_BHTe = self._expanded(latent_BTc)
        step.emit(f"{self.name}.k", k_BHTn)
        step.emit(f"{self.name}.v", v_BHTe)
        step.emit(self.entering[1], self._joined(k_BHTn, k_BTr))

    def _expanded(self, latent_BSc: Tensor) -> tuple[Tensor, Tensor]:
        """Keys' content `[B, H, S, n]` and values `[B, H, S, e]`, in the model's dtype."""
        k_BHSn, v_BHSe = self._heads(self.kv_up, latent_BSc.to(self._dtype))
        return k_BHSn, v_BHSe

    def _joined(self, k_BHSn: Tensor, k_BSr: Tensor) -> Tensor:
        """Keys `[B, H, S, d]` of all heads."""
        k_BHSr = k_BSr.to(k_BHSn.dtype).unsqueeze(1).expand(-1, self.config.heads, -1, -1)
        return torch.cat((k_BHSn, k_BHSr), -1)

    def _absorbed(self, q_BHTd: Tensor, kept_BCk: Tensor, step: Step) -> Tensor:
        """`softmax(scale · ((q W_kᵀ) latentᵀ + q_pe k_peᵀ)) latent W_v`, `[B, H, T, e]`.

        Some of a cache's slots may be empty. In 16 bits PyTorch's products with the matrices round
        queries and results, as the expanded form rounds keys and values; the rest is in at least
        float32. On CUDA the weights of 16-bit latents are rounded as well.
        """
        config = self.config
        w_Hnc, w_Hec = (
            weight.dense().view(config.heads, -1, config.rank) for _, weight in self.kv_up.segments
        )
        q_BHTk, scale = to_columns(q_BHTd, w_Hnc), config.scores.scale
        if not q_BHTk.is_cuda:
            q_BHTk = at_least_float32(q_BHTk)
        k_B1Ck = kept_BCk.unsqueeze(1)
        v_B1Cc = k_B1Ck[..., : config.rank]
        one = step.cached and step.tokens == 1
        narrow = kept_BCk.dtype.itemsize == 2  # for float32 PyTorch's products are faster
        if one and narrow and compiled.attends(q_BHTk, k_B1Ck, v_B1Cc):
            z_BHTc = compiled.attend(
                q_BHTk, k_B1Ck, v_B1Cc, step.starts_B, scale=scale, window=None
            )
        elif one and step.fixed and on_card.attends(q_BHTk, k_B1Ck, v_B1Cc):
            rows = q_BHTk, k_B1Ck[:, :, : step.keys], v_B1Cc[:, :, : step.keys]
            z_BHTc = on_card.attend(
                *rows, step.starts_B, scale=scale, window=None, cap=None, sinks_H=None
            )
        else:
            # queries of all heads are rows of one product with the shared latents
            kept_BSk = batched_factor(kept_BCk[:, : step.keys], q_BHTd.dtype)
            scores_BNS = batched_product(q_BHTk.flatten(1, 2), kept_BSk.mT)
            scores_BNS *= scale
            if step.tokens > 1 or not step.uniform:
                scores_BHTS = scores_BNS.view(*q_BHTd.shape[:3], -1)
                scores_BHTS.masked_fill_(~self._seen(step), -torch.inf)
            z_BNc = batched_product(scores_BNS.softmax(-1), kept_BSk[..., : config.rank])
            z_BHTc = z_BNc.view(*q_BHTd.shape[:3], -1)
        return to_rows(z_BHTc.to(q_BHTd.dtype), w_Hec).to(q_BHTd.dtype)

    def _attend_in_rows(
        self, q_BHTd: Tensor, latent_BSc: Tensor, k_BSr: Tensor, step: Step
    ) -> Tensor:
        """Attention with stored and emitted scores and pattern, for a layer that edits them."""
        k_BHSn, v_BHSe = self._expanded(latent_BSc)
        k_BHSd = self._joined(k_BHSn, k_BSr)
        scores_BHTS = self.scores(q_BHTd, k_BHSd, self._seen(step), step.positions)
        scores_BHTS = step.emit(f"{self.name}.scores", scores_BHTS)
        pattern_BHTS = step.emit(f"{self.name}.pattern", scores_BHTS.softmax(-1))
        return (pattern_BHTS @ at_least_float32(v_BHSe)).to(q_BHTd.dtype)

    def _seen(self, step: Step) -> Tensor:
        """Mask of the keys that each query sees, `[B or 1, 1, T, S]`."""
        visible = visible_keys(step.positions, step.keys, None)
        return visible.unsqueeze(0).unsqueeze(0) if visible.ndim == 2 else visible.unsqueeze(1)

    def derive(
        self,
        name: str,
        emitted: Mapping[str, Tensor],
        first: int,
        stop: int,
        *,
        heads: slice = slice(None),
    ) -> Tensor:
        """Also rows of `k`, `v` and `k_rot`, `[B, H, t, …]`, from the cached latents."""
        leaf = name.rpartition(".")[2]
        if leaf not in ("k", "v", "k_rot"):
            return super().derive(name, emitted, first, stop, heads=heads)
        k_BHtn, v_BHte = self._expanded(emitted[self.kv_norm.name][:, first:stop])
        if leaf == "k_rot":
            k_BHtn = self._joined(k_BHtn, emitted[f"{self.name}.k_pe_rot"][:, first:stop])
        return (v_BHte if leaf == "v" else k_BHtn)[:, heads]

    def scores(
        self, q_BHtd: Tensor, k_BKSd: Tensor, visible: Tensor, positions: Tensor,
        heads: slice | Sequence[int] = slice(None),
    ) -> Tensor:  # fmt: skip
        """The scaled and masked products."""
        return scores(q_BHtd, k_BKSd, visible, scale=self.config.scores.scale)
