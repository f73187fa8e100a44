"""The forward pass of a dense model, written once: what every rung of the ladder has in common.

    X ─┬─ T¹ = norm(X) ── T² = attention(T¹) ─(+)─ T³ ─┬─ T⁴ = norm(T³) ── T⁵ = FFN(T⁴) ─(+)─ H
       └───────────────────────────────────────┘       └──────────────────────────────────┘

These are the documents' equations; blocks with norms elsewhere, or parts side by side, are numbered
alike. A rung says what "the rows of a prompt" are (lists of floats, vectors, a matrix, a batch of
them) and how a few operations are done on them; each file in `rungs` is what it changes.

Nothing here reads the graph of a model or the decoder's code: it is what those are compared with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from llmcli.commands.ladder.measure import notation
from llmcli.commands.ladder.measure.elementwise import (
    TENSORS,
    Function,
    Functions,
    activate,
    add,
    gated,
    sigmoid,
    soft_cap,
)
from llmcli.commands.ladder.measure.notation import Notation
from llmcli.commands.ladder.measure.tensors import growth, rotated
from llmcli.commands.ladder.measure.trace import Note, Show, Value, silent
from llmcli.commands.ladder.measure.weights import (
    AttentionWeights,
    BlockWeights,
    BranchWeights,
    Matrix,
    MlpWeights,
    NormWeights,
    SublayerWeights,
    Weights,
)
from llmcli.commands.ladder.report import NEXT
from llmcli.ops.rope import frequencies
from llmcli.parts.attention.config import AttentionConfig, RopeConfig

Rows = TypeVar("Rows")  # the rows of a prompt, one of each token

Turns = tuple[Tensor, Tensor]  # cos and sin of every position and pair, `[n, R/2]`


class Rung(ABC):
    """One formulation of the model. `ids` is `[n]`, for rungs that take a batch `[b, n]`.

    `number` and `name` say which, `title` what is new in one line.
    """

    number: ClassVar[int]
    name: ClassVar[str]
    title: ClassVar[str]
    batched: ClassVar[bool] = False

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        self.weights = weights
        self.config = weights.config
        self.show = show
        self.ids = torch.empty(0, dtype=torch.long)
        # the first block is shown, and the letters are its
        self.notation = Notation.of(self.config)

    @property
    @abstractmethod
    def change(self) -> tuple[str, str]:
        """The formula of the rung below and this one's, each one or more lines."""

    @property
    @abstractmethod
    def idea(self) -> str:
        """Why it gives the same numbers and what it saves, as far as this model has it."""

    def prepare(self, until: int | None = None) -> None:
        """Converts what `forward` needs, so that timing it measures the arithmetic alone."""
        return

    @abstractmethod
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits of every token, `[n, v]`; with `until=i` the rows `[n, d]` after block i."""

    def start(self, ids: Tensor) -> Tensor:
        """Reads a prompt: logits `[n, v]` of its tokens."""
        self.ids = ids
        return self.forward(ids)

    def extend(self, id: Tensor) -> Tensor:
        """Reads one more token, `[]`: its logits `[v]`. Without a cache all is computed again."""
        return self.start(torch.cat((self.ids, id.reshape(1))))[-1]

    def enter(self, part: str, row: str = "") -> None:
        """What is shown next is in `part`; `row` is `_n` where it is one token's row."""
        self.show.section(f"{NEXT}: {part}" if row else part)

    def enter_block(self, i: int, row: str = "") -> None:
        """The same for block i. All blocks do the same: the first one's steps are kept."""
        part = f"block {i} of {len(self.weights.decoder.config.layers)}"
        self.show.section(f"{NEXT}: {part}" if row else part, again=i > 0)

    def leave_blocks(self, H: Value, axes: str, row: str = "", name: str = "H") -> None:
        """After the last block: its H, from which the logits are made."""
        part = "after the last block"
        configs = self.weights.decoder.config.layers
        cut = len(self.weights.blocks) < len(configs)  # to estimate from: not the model's logits
        self.show.section(f"{NEXT}: {part}" if row else part, again=cut)
        last = len(configs) - 1
        which = f"blocks 1 to {last} do" if last > 1 else "block 1 does"
        same = "with" if all(one == configs[0] for one in configs) else "by their own formulas and"
        words = f"{which} the same {same} their own weights: X of block i + 1 is H of block i"
        self.show(f"{name}{row} of block {last}", H, axes, note=words if last else "")

    @property
    def tied(self) -> str:
        """What W_head is, where it is no matrix of its own."""
        return "W_head = W_Eᵀ: the embeddings are the head, too" if self.config.head.tied else ""


class Walk(Rung, Generic[Rows]):
    """The forward pass over the rows of a prompt, block by block.

    `first`: the position of the first row, `count`: of how many tokens. `row`: what marks the
    names of a single new row.
    """

    functions: ClassVar[Functions] = TENSORS
    layer_note: ClassVar[str] = "Layer = Activation(X W + B), {F} wide"
    up_note: ClassVar[str] = ""

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        super().__init__(weights, show)
        self.row = ""
        self.first = self.count = 0
        self._turns: dict[RopeConfig, Turns] = {}

    # What a rung defines: its rows, and the operations on them.

    @abstractmethod
    def rows_of(self, table: Tensor, indices: Tensor) -> Rows:
        """The rows of a table `[…, width]` at those indices."""

    @abstractmethod
    def product(
        self, name: str, of: str, X: Rows, W: Matrix, into: str, out: str, *, note: str = ""
    ) -> Rows:
        """`X W + b`, called `name`, of `X`, called `of`; `into` and `out` are the axes of W."""

    @abstractmethod
    def norm(self, name: str, of: str, X: Rows, norm: NormWeights, axes: str = "d") -> Rows:
        """Each row `(x - mean) / √(variance + ε) · w + b`; RMSNorm `x / √(mean(x²) + ε) · w`."""

    @abstractmethod
    def each(self, formula: str, f: Function, *X: Rows, axes: str = "d", note: Note = "") -> Rows:
        """`f` of every number of X, or of every pair; shown as `formula`, unless that is empty."""

    @abstractmethod
    def contexts(self, of: str, T: Rows, layer: AttentionWeights) -> Rows:
        """What every head mixes of the values, side by side: rows of `h · d_v` numbers."""

    @abstractmethod
    def stacked(self, X: Rows) -> Tensor:
        """The rows as one tensor `[n, …]`."""

    @abstractmethod
    def show_input(self, X: Rows) -> None:
        """Shows what enters the first block."""

    @abstractmethod
    def show_output(self, H: Rows) -> None:
        """Shows what leaves the last block."""

    def called(self, name: str) -> str:
        """The name of rows in formulas: that of the matrix form, marked where it is one row."""
        return name if name == "logits" else name + self.row

    # The pass.

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits of every token, `[n, v]`; with `until=i` the rows `[n, d]` after block i."""
        self.first = 0
        return self.read(ids, until)

    def read(self, ids: Tensor, until: int | None = None) -> Tensor:
        """The same for the tokens from position `first` on, which then moves behind them."""
        self.count, self._turns = ids.shape[-1], {}
        X = self.embed(ids)
        for i, block in enumerate(self.weights.blocks[: None if until is None else until + 1]):
            self.enter_block(i, self.row)
            X = self.block(block, X)
        if until is None:
            self.show_output(X)
            X = self.logits(self.norm("H′", "H", X, self.weights.final_norm))
        self.first += self.count
        return self.stacked(X)

    def embed(self, ids: Tensor) -> Rows:
        """Each token's row of W_E, scaled, and where positions are learned that of its position."""
        X, factor = self.rows_of(self.weights.W_E, ids), self.config.embedding.scale
        if factor != 1:
            X = self.each("", lambda x: x * factor, X)
        if self.weights.W_P is not None:
            X = self.each("", add, X, self.rows_of(self.weights.W_P, self.positions))
        self.enter("the input", self.row)
        self.show_input(X)
        return X

    def block(self, block: BlockWeights, X: Rows) -> Rows:
        """T¹ = norm(X), T² = attention(T¹), T³ = T² + X, T⁴ = norm(T³), T⁵ = FFN(T⁴), T⁵ + T³."""
        for sublayer in block.sublayers:
            last = sublayer is block.sublayers[-1]
            terms = self.terms(sublayer, X)
            note = notation.SECOND_RESIDUAL if last else notation.FIRST_RESIDUAL
            factor = block.scale if last else 1.0
            X = self.sum(
                sublayer.leaves, (*sublayer.terms, sublayer.stream), *terms, X,
                factor=factor, note=note if block.plain else "",
            )  # fmt: skip
        return X

    def terms(self, sublayer: SublayerWeights, X: Rows) -> list[Rows]:
        """What a sublayer adds to the stream: its branches, or their sum after a norm."""
        T, added = X, []
        for branch in sublayer.branches:
            if branch.norm is not None:
                T = self.norm(branch.reads, sublayer.stream, X, branch.norm)
            elif not branch.shares_norm:
                T = X
            added.append(self.branch(branch, T))
        if sublayer.sum_norm is None:
            return added
        total = self.sum(sublayer.summed, [one.adds for one in sublayer.branches], *added)
        return [self.norm(sublayer.normed_sum, sublayer.summed, total, sublayer.sum_norm)]

    def branch(self, branch: BranchWeights, T: Rows) -> Rows:
        """`multiplier · post(part(T))`."""
        match branch.part:
            case AttentionWeights() as part:
                Y = self.attention(branch.makes, branch.reads, T, part)
            case MlpWeights() as part:
                Y = self.feed_forward(branch.makes, branch.reads, T, part)
        if branch.post is not None:
            Y = self.norm(branch.posted, branch.makes, Y, branch.post)
        factor = branch.multiplier
        if factor != 1:
            formula = f"{self.called(branch.adds)} = {self.called(branch.posted)} · {factor:.4g}"
            Y = self.each(formula, lambda y: y * factor, Y)
        return Y

    def sum(
        self, name: str, names: list[str] | tuple[str, ...], *X: Rows, factor: float = 1.0,
        note: str = "",
    ) -> Rows:  # fmt: skip
        """The sum of rows of those names, times a factor."""
        total = " + ".join(map(self.called, names))
        if factor == 1:
            return self.each(f"{self.called(name)} = {total}", add, *X, note=note)
        formula = f"{self.called(name)} = ({total}) · {factor:.4g}"
        return self.each(formula, lambda *x: add(*x) * factor, *X)

    def attention(self, name: str, of: str, T: Rows, layer: AttentionWeights) -> Rows:
        """The heads' contexts side by side, times their gates where there are any, times W_o."""
        C, c, axes = self.contexts(of, T, layer), "C", self.notation.C
        if layer.gate is not None:
            G = self.product("G_o", of, T, layer.gate, "d", axes)
            formula = f"{self.called('C_o')} = σ({self.called('G_o')}) ∘ {self.called('C')}"
            opened = self.functions
            C = self.each(formula, lambda g, c: sigmoid(g, opened) * c, G, C, axes=axes)
            c = "C_o"
        return self.product(name, c, C, layer.o, axes, "d")

    def feed_forward(self, name: str, of: str, T: Rows, layer: MlpWeights) -> Rows:
        """Each layer `Activation(X W + B)`, no activation after the last."""
        config, F, functions = layer.config, self.notation.F, self.functions
        U = self.product("U", of, T, layer.up, "d", F, note=self.up_note)
        hidden, up, gates = map(self.called, "LUG")
        formula = notation.layer_formula(hidden, up, gates, config)
        note = self.layer_note.format(F=F)
        if layer.gate is None:
            kind = config.activation
            L = self.each(formula, lambda u: activate(kind, u, functions), U, axes=F, note=note)
        else:
            G = self.product("G", of, T, layer.gate, "d", F)
            L = self.each(
                formula, lambda g, u: gated(g, u, config, functions), G, U, axes=F, note=note
            )
        return self.product(name, "L", L, layer.down, F, "d")

    def logits(self, H: Rows) -> Rows:
        """`H′ W_head`, soft-capped or scaled where the model does that."""
        config, functions = self.config.head, self.functions
        finish = notation.finished_logits(self.called("raw"), self.config)
        name = "raw" if finish else "logits"
        raw = self.product(name, "H′", H, self.weights.head, "d", "v", note=self.tied)
        cap, scale = config.cap, config.scale
        if cap is not None:
            return self.each(finish, lambda x: soft_cap(x, cap, functions), raw, axes="v")
        return self.each(finish, lambda x: x * scale, raw, axes="v") if finish else raw

    # Positions.

    @property
    def positions(self) -> Tensor:
        """Those of the rows, `[n]`."""
        return torch.arange(self.first, self.first + self.count)

    def angles(self, rope: RopeConfig) -> tuple[Tensor, float]:
        """Radians per position of each pair of a head `[R/2]` in float64, and the factor on both.

        The length so far matters to the dynamic kinds only.
        """
        return frequencies(rope, self.first + self.count)

    def turns(self, rope: RopeConfig) -> Turns:
        """cos and sin of every position and pair, `[n, R/2]`: computed once for all layers.

        Computing them anew is no formula of a rung, and would be half of the time of some.
        """
        if rope not in self._turns:
            per_position, factor = self.angles(rope)
            turns = torch.outer(self.positions.double(), per_position)
            like = self.weights.W_E
            self._turns[rope] = (turns.cos() * factor).to(like), (turns.sin() * factor).to(like)
        return self._turns[rope]


class HeadByHead(Walk[Rows]):
    """A walk on rows of tensors, whose queries, keys and values are made head by head."""

    @abstractmethod
    def unstacked(self, X: Tensor) -> Rows:
        """The rows of a tensor `[n, …]`."""

    def queries(self, of: str, T: Rows, layer: AttentionWeights) -> list[Rows]:
        """`Q = T W_q` of every head, rows of `d/h` numbers, as they enter the scores."""
        mixer, (wide, _) = layer.config, self.notation.wide_norms
        Q = self.projected("Q", of, T, layer.q, mixer.heads)
        Q = self.normed("Q", Q, layer.q_norm, mixer.qk_norm_wide, wide)
        return [self.placed("Q", X, mixer) for X in Q]

    def keys_values(
        self, of: str, T: Rows, layer: AttentionWeights
    ) -> tuple[list[Rows], list[Rows]]:
        """`K = T W_k` and `V = T W_v` of every key/value head, as they enter the products."""
        mixer, (_, wide), dv = layer.config, self.notation.wide_norms, self.notation.dv
        K = self.projected("K", of, T, layer.k, mixer.kv_heads)
        K = self.normed("K", K, layer.k_norm, mixer.qk_norm_wide, wide)
        K = [self.placed("K", X, mixer) for X in K]
        V = self.projected("V", of, T, layer.v, mixer.kv_heads, dv)
        return K, self.normed("V", V, layer.v_norm, False, dv)

    def projected(
        self, name: str, of: str, T: Rows, W: Matrix, heads: int, axes: str = "d/h"
    ) -> list[Rows]:
        """`T W` of every head: its W is so many columns of the stored one, a view."""
        size = W.W.shape[1] // heads
        cuts = [W.columns(head * size, (head + 1) * size) for head in range(heads)]
        return [self.product(name, of, T, cut, "d", axes) for cut in cuts]

    def normed(
        self, name: str, X: list[Rows], norm: NormWeights | None, together: bool, axes: str
    ) -> list[Rows]:
        """Each head's rows normalized by themselves, or the rows of all heads together."""
        if norm is None:
            return X
        y = f"{name}_norm"
        if not together:
            return [self.norm(y, name, x, norm, axes) for x in X]
        whole = self.each("", lambda *x: torch.cat(x, -1), *X)
        whole, heads = self.norm(y, name, whole, norm, axes), len(X)
        return [self.each("", lambda x, i=i: x.chunk(heads, -1)[i], whole) for i in range(heads)]

    def placed(self, letter: str, X: Rows, mixer: AttentionConfig, axes: str = "d/h") -> Rows:
        """Queries or keys rotated by their position, where the model does that; queries grown."""
        name = letter if mixer.qk_norm is None else f"{letter}_norm"
        if mixer.rope is not None:
            before, name = name, f"{letter}_rot"
            formula = f"{self.called(name)} = R(position) {self.called(before)}"
            turns = (self.unstacked(one) for one in self.turns(mixer.rope))
            X = self.each(formula, rotated, X, *turns, axes=axes)
        if letter == "Q" and mixer.growth is not None:
            formula = notation.growth_formula(self.called("Q_grown"), self.called(name), mixer)
            factors = growth(mixer.growth, self.positions, self.weights.W_E).unsqueeze(-1)
            X = self.each(formula, lambda x, f: x * f, X, self.unstacked(factors), axes=axes)
        return X
