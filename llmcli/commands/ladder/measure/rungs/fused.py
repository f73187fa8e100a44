"""Rung 8: fused kernels, the decoder that llmcli runs.

Nothing of it is written here: `llmcli.nn.Decoder` is rung 7 with fewer and larger kernels, and
this file shows its activations under the documents' names.
"""

from __future__ import annotations

import re
from typing import ClassVar

from torch import Tensor

from llmcli.commands.ladder.measure import notation
from llmcli.commands.ladder.measure.notation import Notation, placed
from llmcli.commands.ladder.measure.trace import Show, silent
from llmcli.commands.ladder.measure.walk import Rung
from llmcli.commands.ladder.measure.weights import (
    AttentionWeights,
    BlockWeights,
    BranchWeights,
    Matrix,
    MlpWeights,
    NormWeights,
    Weights,
)
from llmcli.engine.session import Session
from llmcli.nn.step import Tap
from llmcli.parts.attention.forward import Attention

Step = tuple[str, str]  # formula and axes


class FusedKernels(Rung):
    """The project's own decoder, with its cache."""

    number: ClassVar[int] = 8
    name: ClassVar[str] = "fused"
    title: ClassVar[str] = "fused kernels: the decoder that llmcli runs"
    batched: ClassVar[bool] = True

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self.session: Session | None = None

    @property
    def change(self) -> tuple[str, str]:
        """Many kernels become few."""
        Q, K, V = (self.notation.placed(letter) for letter in "QKV")
        gated = "\nG and U in one product, too" if self.notation.gated else ""
        return (
            f"{Q} {K}ᵀ, scale, + M, softmax (5), A {V}: 9 kernels, 6 tensors of n × n",
            f"attend({Q}, {K}, {V}): one kernel, no n × n tensor{gated}",
        )

    @property
    def idea(self) -> str:
        """What each kernel saves."""
        together = ", and of gate and up," if self.notation.gated else ""
        return (
            "Fewer, larger kernels for the same formulas. Attention is one call that goes through "
            "K and V in blocks and keeps a running maximum and sum for the softmax, so that the "
            "n × n scores never lie in memory and, where the kernel is told that the mask is "
            "causal, need not be computed above the diagonal. The weights of queries and keys and "
            f"values{together} lie one after the other as the model is loaded (no copy for this "
            "rung); bias and product are one kernel, and so are the steps of a norm. The sums are "
            "taken in another order: the same numbers to rounding. The cache has room for the "
            "whole sequence and is written in place."
        )

    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits `[b, n, v]` of `[b, n]` ids; with `until=i` the rows `[b, n, d]`."""
        return self.weights.decoder(ids, until=until, tap=self._tap(""))

    def start(self, ids: Tensor) -> Tensor:
        """The same with an empty cache, which has room for some tokens after the prompt."""
        batch, n = ids.shape
        self.session = Session(self.weights.decoder, batch, max(2 * n, 32))
        return self.session.extend(ids, logits="all", tap=self._tap(""))

    def extend(self, id: Tensor) -> Tensor:
        """Reads one more token of each sequence, `[b]`: their logits `[b, v]`.

        Raises ValueError where no prompt was read before.
        """
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
        known = steps(self.weights, self.notation, row)
        last = f"blocks.{len(self.config.layers) - 1}.resid_post"

        def tap(name: str, value: Tensor) -> None:
            block = re.match(r"blocks\.(\d+)\.", name)
            step = known.get(f"blocks.0.{name[block.end() :]}" if block else name)
            if name == "blocks.0.resid_pre":
                self.enter("the input", row)
            elif block is not None:
                self.enter_block(int(block[1]), row)
            if name == "blocks.0.attn.q" and not row:
                self._stored()
            if step is not None:
                self.show(step[0], value, step[1])
            if name == last:
                self.leave_blocks(value, f"b × {'1' if row else 'n'} × d", row)

        return tap

    def _stored(self) -> None:
        """Shows that W_q, W_k and W_v are views of what was loaded. It is stored `[out, in]`."""
        decoder, axes = self.weights.decoder, self.notation
        mixer = decoder.blocks[0].parts["blocks.0.attn"]
        assert isinstance(mixer, Attention)
        whole = mixer.qkv.weight.dense()
        places = {"q": ("first", axes.Q), "k": ("next", axes.K), "v": ("last", axes.V)}
        for part, (_, segment) in zip(mixer.config.entering, mixer.qkv.segments, strict=True):
            if part in places:
                place, columns = places[part]
                words = f"W_{part}ᵀ, the {place} rows of the stored W_qkvᵀ"
                self.show(words, segment.dense(), f"{columns} × d", source=whole)


def steps(weights: Weights, of: Notation, row: str) -> dict[str, Step]:
    """The decoder's activations, those of block 0 and of the ends, as the documents write them.

    `row` is `_n` where only the last row of each sequence is computed. `Q` has one axis more than
    `T¹`: the decoder splits the heads in the same kernel.
    """
    config, rows = weights.config, f"b × {'1' if row else 'n'}"
    finish = notation.finished_logits(f"raw{row}", config)
    logits = f"raw{row}" if finish else "logits"
    head = (f"{logits} = H′{row} W_head{weights.head.plus_bias}", f"{rows} × v")
    made = notation.embedding_formula(config, "ids", "positions")
    found = {
        "blocks.0.resid_pre": (f"X{row} = {made}", f"{rows} × d"),
        "ln_final.out": (_normed("H′", "H", row, weights.final_norm), f"{rows} × d"),
        "logits_raw" if finish else "logits": head,
    }
    if finish:
        found["logits"] = (finish, f"{rows} × v")
    return found | _Block(weights.blocks[0], of, row).steps()


def _normed(y: str, x: str, row: str, norm: NormWeights) -> str:
    return notation.norm_formulas(y + row, x + row, norm.config)[2]


class _Block:
    """The steps of one block."""

    def __init__(self, block: BlockWeights, of: Notation, row: str) -> None:
        self.block, self.of, self.row = block, of, row
        self.n = "1" if row else "n"
        self.rows = f"b × {self.n}"

    def steps(self) -> dict[str, Step]:
        """By the decoder's names."""
        found: dict[str, Step] = {}
        for sublayer in self.block.sublayers:
            for branch in sublayer.branches:
                found |= self._branch(branch, sublayer.stream)
            row = self.row
            if sublayer.sum_norm is not None and (names := sublayer.tensors.summed) is not None:
                terms = " + ".join(branch.adds + row for branch in sublayer.branches)
                found[names.sum] = self._wide(f"{sublayer.summed}{row} = {terms}")
                formula = _normed(sublayer.normed_sum, sublayer.summed, row, sublayer.sum_norm)
                found[f"{names.norm}.out"] = self._wide(formula)
            total = " + ".join(name + row for name in (*sublayer.terms, sublayer.stream))
            if sublayer is self.block.sublayers[-1] and self.block.scale != 1:
                total = f"({total}) · {self.block.scale:.4g}"
            found[sublayer.tensors.leaves] = self._wide(f"{sublayer.leaves}{row} = {total}")
        return found

    def _wide(self, formula: str) -> Step:
        return formula, f"{self.rows} × d"

    def _branch(self, branch: BranchWeights, stream: str) -> dict[str, Step]:
        names, row, part = branch.tensors, self.row, branch.part
        match part:
            case AttentionWeights():
                found, out, before = self._attention(part, names.part, branch.reads), part.o, "C"
                before = "C" if part.gate is None else "C_o"
            case MlpWeights():
                found, out, before = self._mlp(part, names.part, branch.reads), part.down, "L"
        if branch.norm is not None:
            formula = _normed(branch.reads, stream, row, branch.norm)
            found[f"{names.norm}.out"] = self._wide(formula)
        formula = f"{branch.makes}{row} = {before}{row} {out.name}{out.plus_bias}"
        found[names.makes] = self._wide(formula)
        if branch.post is not None:
            formula = _normed(branch.posted, branch.makes, row, branch.post)
            found[f"{names.post}.out"] = self._wide(formula)
        if branch.multiplier != 1:
            formula = f"{branch.adds}{row} = {branch.posted}{row} · {branch.multiplier:.4g}"
            found[names.adds] = self._wide(formula)
        return found

    def _attention(self, part: AttentionWeights, name: str, reads: str) -> dict[str, Step]:
        of, row, mixer = self.of, self.row, part.config
        q = f"b × h × {self.n} × d/h"
        k, v = (f"b × {of.h_kv} × {self.n} × {size}" for size in ("d/h", of.dv))
        Q, K, V = f"{placed('Q', mixer)}{row}", placed("K", mixer), placed("V", mixer)
        z = f"b × h × {self.n} × {of.dv}"
        found = {
            f"{name}.q": (f"Q{row}, columns of one product", q),
            f"{name}.k": (f"K{row}, columns of the same", k),
            f"{name}.v": (f"V{row}, columns of the same", v),
            f"{name}.z": (f"C{row} = attend({Q}, {K}, {V}), one kernel", z),
        }
        if part.gate is not None:
            found[f"{name}.gate"] = (f"G_o{row}, columns of the same", z)
            found[f"{name}.gated"] = (f"C_o{row} = σ(G_o{row}) ∘ C{row}, seen by heads", z)
        norms = (("q", part.q_norm, q), ("k", part.k_norm, k), ("v", part.v_norm, v))
        for letter, norm, axes in norms:
            big = letter.upper()
            if norm is not None:
                formula = _normed(f"{big}_norm", big, row, norm)
                if mixer.qk_norm_wide and letter != "v":
                    formula += ", seen by heads"
                found[f"{name}.{letter}_norm"] = (formula, axes)
            if mixer.rope is not None and letter != "v":
                before = f"{big}{'' if norm is None else '_norm'}{row}"
                formula = f"{big}_rot{row} = R(position) {before}"
                found[f"{name}.{letter}_rot"] = (formula, axes)
        return found

    def _mlp(self, part: MlpWeights, name: str, reads: str) -> dict[str, Step]:
        row, F = self.row, f"{self.rows} × {self.of.F}"
        formula = notation.layer_formula(f"L{row}", f"U{row}", f"G{row}", part.config)
        return {
            f"{name}.pre": (self._product("U", reads, part.up), F),
            f"{name}.gate": (f"G{row}, columns of one product", F),
            f"{name}.up": (f"U{row}, columns of the same", F),
            f"{name}.post": (formula, F),
        }

    def _product(self, name: str, reads: str, W: Matrix) -> str:
        return f"{name}{self.row} = {reads}{self.row} {W.name}{W.plus_bias}"
