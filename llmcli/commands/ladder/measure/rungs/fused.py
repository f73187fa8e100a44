"""Rung 8: fused kernels, the decoder that llmcli runs."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from llmcli.commands.ladder.measure.record import shown
from llmcli.commands.ladder.measure.walk import Rung
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.engine.session import Session
from llmcli.parts.attention.forward import Attention


class FusedKernels(Rung):
    """The project's own decoder, with its cache."""

    title = "fused kernels: the decoder that llmcli runs"
    before = "Q Kᵀ, scale, + M, softmax (5), A V: 9 kernels, 6 tensors of n × n"
    here = """\
attend(Q, K, V): one kernel, no n × n tensor[gated:
G and U in one product, too]"""
    idea = """
Fewer, larger kernels for the same formulas. Attention is one call that goes through K and V in
blocks and keeps a running maximum and sum for the softmax, so that the n × n scores never lie in
memory and, where the kernel is told that the mask is causal, need not be computed above the
diagonal. The weights of queries and keys and values[gated:, and of gate and up,] lie one after the
other as the model is loaded (no copy for this rung); bias and product are one kernel, and so are
the steps of a norm. The sums are taken in another order: the same numbers to rounding. The cache
has room for the whole sequence and is written in place."""
    batched: ClassVar[bool] = True

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.session: Session | None = None
        self.stored(f"blocks.{weights.attentions[0].block}.attn")

    @shown
    def stored(self, name: str) -> list[Tensor]:
        """W_q, W_k and W_v as loaded, `[out, in]`: the first, next and last rows of one W_qkv."""
        decoder = self.weights.decoder
        mixer = decoder.blocks[self.weights.attentions[0].block].parts[name]
        assert isinstance(mixer, Attention)
        w_jd = mixer.qkv.weight.dense()
        w_q_cd = decoder.weight(f"{name}.W_q").dense()
        w_k_cd = decoder.weight(f"{name}.W_k").dense()
        w_v_cd = decoder.weight(f"{name}.W_v").dense()
        return [w_jd, w_q_cd, w_k_cd, w_v_cd]

    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[b, n, v]` of `[b, n]` ids; with `until=i` the rows `[b, n, d]`."""
        return self.weights.decoder(ids, until=until, tap=self.tap)

    @shown
    def start(self, ids: Tensor) -> Tensor:
        """The decoder reads a prompt: the cache has room for some tokens after it."""
        batch, n = ids.shape
        self.session = Session(self.weights.decoder, batch, max(2 * n, 32))
        logits_bnv = self.session.extend(ids, logits="all", tap=self.tap)
        return logits_bnv

    @shown
    def extend(self, id: Tensor) -> Tensor:
        """Reads one more token of each sequence, `[b]`: their logits `[b, v]`.

        Raises ValueError where no prompt was read before.
        """
        if self.session is None:
            raise ValueError("nothing to extend: no prompt was read")
        n = self.session.lengths[0]
        if n == self.session.state.capacity:
            self.session.grow(2 * n)
        logits_bv = self.session.extend(id.unsqueeze(1), tap=self.tap)
        return logits_bv
