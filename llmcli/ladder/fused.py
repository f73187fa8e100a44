"""Rung 8: fused kernels, the decoder that llmcli runs.

Nothing of it is written here: `llmcli.nn.Decoder` is rung 7 with fewer and larger kernels, and
this file shows its activations under the documents' names. Letters: b sequences, n tokens so far,
d width, h heads, k key/value heads, d/h size of a head, F hidden size, v vocabulary.
"""

from __future__ import annotations

import re
from typing import ClassVar

from torch import Tensor

from llmcli.ladder.rung import Rung, Show, silent
from llmcli.ladder.weights import Weights
from llmcli.nn.state import State
from llmcli.nn.step import Tap

# The decoder's activations, by the end of their names, as the documents write them; `_` stands for
# `_n` where only the last row of each sequence is computed.
STEPS = {
    "embed": "W_E[ids]",
    "pos_embed": "W_P[positions]",
    "resid_pre": "X",
    "ln1.out": "T = T¹ = norm(X)",
    "attn.q": "Q_, columns of one product",
    "attn.k": "K_, columns of the same",
    "attn.v": "V_, columns of the same",
    "attn.q_norm": "Q_ = norm(Q_)",
    "attn.k_norm": "K_ = norm(K_)",
    "attn.q_rot": "Q_ rotated by position",
    "attn.k_rot": "K_ rotated by position",
    "attn.z": "C_ = attend(Q_, K, V), one kernel",
    "attn_out": "T² = attention(T¹), from C_",
    "resid_mid": "T³ = T² + X",
    "ln2.out": "T⁴ = norm(T³)",
    "mlp.pre": "up",
    "mlp.gate": "gate, columns of one product",
    "mlp.up": "up, columns of the same",
    "mlp.post": "hidden",
    "mlp_out": "T⁵ = FFN(T⁴)",
    "resid_post": "H = T⁵ + T³",
    "ln_final.out": "T = norm(H)",
    "logits": "logits",
}


class FusedKernels(Rung):
    """The project's own decoder, with its cache."""

    number: ClassVar[int] = 8
    name: ClassVar[str] = "fused"
    title: ClassVar[str] = "fused kernels: the decoder that llmcli runs"
    change: ClassVar[tuple[str, str]] = (
        "Q Kᵀ, scores + M, · scale, softmax, A V: five kernels, four b × h × n × n tensors",
        "attend(Q, K, V): one kernel, no n × n tensor; gate and up in one product, too",
    )
    idea: ClassVar[str] = (
        "Fewer, larger kernels for the same formulas. Attention is one call that goes through K "
        "and V in blocks and keeps a running maximum and sum for the softmax, so that the n × n "
        "scores never lie in memory and, where the kernel is told that the mask is causal, need "
        "not be computed above the diagonal. The weights of queries and keys and values, and of "
        "gate and up, lie one after the other as the model is loaded (no copy for this rung); "
        "bias and product are one kernel, and so are the steps of a norm. The sums are taken in "
        "another order: the same numbers to rounding. The cache has room for the whole sequence "
        "and is written in place."
    )
    batched: ClassVar[bool] = True

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self.state: State | None = None

    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[b, n, v]` of `[b, n]` ids; with `until=i` the rows `[b, n, d]`."""
        decoder = self.weights.decoder
        return decoder(ids, until=until, tap=self._tap(""))

    def start(self, ids: Tensor) -> Tensor:
        """The same with an empty cache, which has room for some tokens after the prompt."""
        decoder = self.weights.decoder
        batch, n = ids.shape
        self.state = decoder.new_state(batch, max(2 * n, 32))
        return decoder(ids, self.state, tap=self._tap(""))

    def extend(self, id: Tensor) -> Tensor:
        """Reads one token more of each sequence, `[b]`: their logits `[b, v]`."""
        if self.state is None:
            raise ValueError("nothing to extend: no prompt was read")
        n = self.state.lengths[0]
        if n == self.state.capacity:
            self.state.grow(2 * n)
        out = self.weights.decoder(id.unsqueeze(1), self.state, tap=self._tap("_n"))
        return out[:, -1]

    def _tap(self, row: str) -> Tap | None:
        """Shows what the decoder emits; None, and so nothing extra computed, where no one looks."""
        if self.show is silent:
            return None
        decoder = self.weights.decoder
        whole, part = decoder.blocks[0].mixer.qkv.weight, decoder.slots["blocks.0.attn.W_k"]
        self.show("W_k, some rows of the stored W_qkvᵀ", part, source=whole)

        def tap(name: str, value: Tensor) -> None:
            step = STEPS.get(re.sub(r"^blocks\.\d+\.", "", name))
            if step is not None:
                self.show(re.sub(r"\b([QKVCT])_(?!\w)", rf"\1{row}", step), value)

        return tap
