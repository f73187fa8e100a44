"""Rung 8: fused kernels, the decoder that llmcli runs.

Nothing of it is written here: `llmcli.nn.Decoder` is rung 7 with fewer and larger kernels, and
this file shows its activations under the documents' names. Letters: b sequences, n tokens so far,
d width, h heads, h_kv of keys and values, d/h size of a head, F hidden size, v vocabulary.
"""

from __future__ import annotations

import re
from typing import ClassVar

from torch import Tensor

from llmcli.config import ModelConfig
from llmcli.engine.session import Session
from llmcli.ladder import letters
from llmcli.ladder.block import plain_blocks
from llmcli.ladder.letters import Letters
from llmcli.ladder.rung import Rung, Show, silent
from llmcli.ladder.weights import Weights
from llmcli.nn.step import Tap
from llmcli.parts.attention.forward import Attention
from llmcli.parts.norm.config import NormConfig

Step = tuple[str, str]  # formula and axes


def steps(config: ModelConfig, of: Letters, row: str) -> dict[str, Step]:
    """The decoder's activations, by the end of their names, as the documents write them.

    `row` is `_n` where only the last row of each sequence is computed. `Q` has one axis more than
    `T¹`: the decoder splits the heads in the same kernel.
    """
    first, n_, n = plain_blocks(config)[0], row, "1" if row else "n"
    gated, rows = first.ffn.gated, f"b × {n}"
    q, k, v = f"b × h × {n} × d/h", f"b × {of.h_kv} × {n} × d/h", f"b × {of.h_kv} × {n} × {of.dv}"
    hidden = f"b × {n} × {of.F}"
    normed = "_norm" if first.mixer.qk_norm is not None else ""
    tables = " + W_P[positions]" if config.embedding.positions else ""
    attended = f"C{n_} = attend({of.placed('Q')}{n_}, {of.placed('K')}, V), one kernel"
    b_o = " + b_o" if first.mixer.out_bias else ""
    b_down, b_head = " + b_down" if first.ffn.bias else "", " + b_head" if config.head.bias else ""
    up = "U" if gated else "U{n_} = T⁴{n_} W_up" + (" + b_up" if first.ffn.bias else "")

    def norm(name: str, of_: str, config: NormConfig) -> str:
        return letters.norm_formulas(f"{name}{n_} = norm({of_}{n_})", config)[2]

    return {
        "resid_pre": (f"X{n_} = W_E[ids]{tables}", f"{rows} × d"),
        "ln1.out": (norm("T¹", "X", first.ln1), f"{rows} × d"),
        "attn.q": (f"Q{n_}, columns of one product", q),
        "attn.k": (f"K{n_}, columns of the same", k),
        "attn.v": (f"V{n_}, columns of the same", v),
        "attn.q_norm": (norm("Q_norm", "Q", first.mixer.qk_norm or first.ln1), q),
        "attn.k_norm": (norm("K_norm", "K", first.mixer.qk_norm or first.ln1), k),
        "attn.q_rot": (f"Q_rot{n_} = R(position) Q{normed}{n_}", q),
        "attn.k_rot": (f"K_rot{n_} = R(position) K{normed}{n_}", k),
        "attn.z": (attended, f"b × h × {n} × {of.dv}"),
        "attn_out": (f"T²{n_} = C{n_} W_o{b_o}", f"{rows} × d"),
        "resid_mid": (f"T³{n_} = T²{n_} + X{n_}", f"{rows} × d"),
        "ln2.out": (norm("T⁴", "T³", first.ln2), f"{rows} × d"),
        "mlp.pre": (up.format(n_=n_), hidden),
        "mlp.gate": (f"G{n_}, columns of one product", hidden),
        "mlp.up": (f"U{n_}, columns of the same", hidden),
        "mlp.post": (letters.layer_formula(first.ffn.activation, gated=gated, row=n_), hidden),
        "mlp_out": (f"T⁵{n_} = L{n_} W_down{b_down}", f"{rows} × d"),
        "resid_post": (f"H{n_} = T⁵{n_} + T³{n_}", f"{rows} × d"),
        "ln_final.out": (norm("H′", "H", config.final_norm), f"{rows} × d"),
        "logits": (f"logits = H′{n_} W_head{b_head}", f"{rows} × v"),
    }


class FusedKernels(Rung):
    """The project's own decoder, with its cache."""

    number: ClassVar[int] = 8
    name: ClassVar[str] = "fused"
    title: ClassVar[str] = "fused kernels: the decoder that llmcli runs"
    batched: ClassVar[bool] = True

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self.session: Session | None = None

    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[b, n, v]` of `[b, n]` ids; with `until=i` the rows `[b, n, d]`."""
        decoder = self.weights.decoder
        return decoder(ids, until=until, tap=self._tap(""))

    def start(self, ids: Tensor) -> Tensor:
        """The same with an empty cache, which has room for some tokens after the prompt."""
        batch, n = ids.shape
        self.session = Session(self.weights.decoder, batch, max(2 * n, 32))
        return self.session.extend(ids, logits="all", tap=self._tap(""))

    def extend(self, id: Tensor) -> Tensor:
        """Reads one token more of each sequence, `[b]`: their logits `[b, v]`."""
        if self.session is None:
            raise ValueError("nothing to extend: no prompt was read")
        n = self.session.lengths[0]
        if n == self.session.state.capacity:
            self.session.grow(2 * n)
        return self.session.extend(id.unsqueeze(1), tap=self._tap("_n"))

    def _tap(self, row: str) -> Tap | None:
        """Shows what the decoder emits; None, and so nothing extra computed, where no one looks."""
        if self.show is silent:
            return None
        known = steps(self.config, self.letters, row)
        last = f"blocks.{len(self.config.layers) - 1}.resid_post"

        def tap(name: str, value: Tensor) -> None:
            block = re.match(r"blocks\.(\d+)\.", name)
            step = known.get(name[block.end() :] if block else name)
            if step is None:
                return
            formula, axes = step
            if name == "blocks.0.resid_pre":
                self.enter("the input", row)
            elif block is not None:
                self.enter_block(int(block[1]), row)
            self.show(formula, value, axes)
            if name == "blocks.0.ln1.out" and not row:
                self._stored()
            if name == last:
                self.leave_blocks(value, axes, row)

        return tap

    def _stored(self) -> None:
        """Shows that W_q, W_k and W_v are views of what was loaded. It is stored `[out, in]`."""
        decoder, axes = self.weights.decoder, self.letters
        mixer = decoder.blocks[0].parts["blocks.0.attn"]
        assert isinstance(mixer, Attention)
        whole = mixer.qkv.weight.dense()
        places = (("q", "first", axes.Q), ("k", "next", axes.K), ("v", "last", axes.V))
        for (letter, place, columns), (_, part) in zip(places, mixer.qkv.segments, strict=True):
            words = f"W_{letter}ᵀ, the {place} rows of the stored W_qkvᵀ"
            self.show(words, part.dense(), f"{columns} × d", source=whole)
