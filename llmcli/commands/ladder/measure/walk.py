"""The forward pass of a dense model, written once: what every rung of the ladder has in common.

    X ─┬─ T¹ = norm(X) ── T² = attention(T¹) ─(+)─ T³ ─┬─ T⁴ = norm(T³) ── T⁵ = FFN(T⁴) ─(+)─ H
       └───────────────────────────────────────┘       └──────────────────────────────────┘

These are the documents' equations. A rung says what "the rows of a prompt" are (lists of floats,
vectors, a matrix, a batch of them) and how a few operations are done on them; its class in `rungs`
is what it changes. A name ends in the letters of its axes (`report.AXES`): b sequences, n tokens
that are computed, m tokens whose keys are read, d width, h heads, v vocabulary.

Nothing here reads the graph of a model or the decoder's code: it is what those are compared with.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.record import shown, shown_last
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
from llmcli.config.attention import RopeConfig, Window
from llmcli.config.mlp import Activation, MlpConfig
from llmcli.nn.step import Tap
from llmcli.ops.rope import frequencies

Function = Callable[..., Any]  # of floats to a float, of tensors to a tensor
Rows = Any  # the rows of a prompt: lists of floats, vectors `[d]`, a matrix `[n, d]`, `[b, n, d]`
Turns = tuple[Tensor, Tensor]  # cos and sin of every position and pair, `[n, R/2]`


class Rung(ABC):
    """One formulation of the model. `ids` is `[n]`, for rungs that take a batch `[b, n]`."""

    batched: ClassVar[bool] = False

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.config = weights.config
        self.tap: Tap | None = None  # receives what the decoder emits
        self.ids = torch.empty(0, dtype=torch.long)

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


class Walk(Rung):
    """The forward pass over the rows of a prompt, block by block.

    `first`: the position of the first row, `count`: of how many tokens.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.first = self.count = 0
        self._turns: dict[RopeConfig, Turns] = {}
        self.masks: dict[Window | None, Tensor] = {}  # by the window

    # What a rung defines: its rows, here those of one tensor, and the operations on them.

    def stacked(self, x_ni: Rows) -> Tensor:
        """The rows as one tensor `[n, …]`."""
        rows: Tensor = x_ni
        return rows

    def unstacked(self, x_ni: Tensor) -> Rows:
        """The rows of a tensor `[n, …]`."""
        return x_ni

    def each(self, f: Function, *x_ni: Rows) -> Rows:
        """`f` of every number of X, or of every pair: all of them at once."""
        return f(*x_ni)

    def product(self, x_ni: Rows, matrix: Matrix) -> Rows:
        """`X W + b`, row by row or all rows at once."""
        return self.each(lambda x: times(x, matrix), x_ni)

    def norm(self, x_ni: Rows, norm: NormWeights) -> Rows:
        """Each row `(x - mean) / √(variance + ε) · w + b`; RMSNorm `x / √(mean(x²) + ε) · w`."""
        return self.each(lambda x: normalized(x, norm), x_ni)

    @abstractmethod
    def contexts(self, t_nd: Rows, layer: AttentionWeights) -> Rows:
        """What every head mixes of the values, side by side: rows of `h · d_v` numbers."""

    # The pass.

    @torch.inference_mode()
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits of every token, `[n, v]`; with `until=i` the rows `[n, d]` after block i."""
        self.first = 0
        return self.read(ids, until)

    @shown
    def read(self, ids: Tensor, until: int | None = None) -> Tensor:
        """X, then block after block, each with its own weights, then the logits."""
        self.count, self._turns, self.masks = ids.shape[-1], {}, {}
        x_nd = self.embed(ids)
        for block in self.weights.blocks[: None if until is None else until + 1]:
            x_nd = self.block(x_nd, block)  # X of block i + 1 is H of block i
        self.first += self.count
        if until is not None:
            return self.stacked(x_nd)
        h_nd = self.norm(x_nd, self.weights.final_norm)  # H′ = norm(H)
        return self.stacked(self.logits(h_nd))

    @shown
    def embed(self, ids: Tensor) -> Rows:
        """X: each token's row of W_E, scaled, and where positions are learned that of W_P."""
        x_nd = self.unstacked(self.weights.W_E[ids])
        factor = self.config.embedding.scale
        if factor != 1:
            x_nd = self.each(lambda x: x * factor, x_nd)
        if self.weights.W_P is not None:
            p_nd = self.unstacked(self.weights.W_P[self.positions])
            x_nd = self.each(add, x_nd, p_nd)
        return x_nd

    @shown
    def block(self, x_nd: Rows, block: BlockWeights) -> Rows:
        """T¹ = norm(X), T² = attention(T¹), T³ = T² + X, T⁴ = norm(T³), T⁵ = FFN(T⁴), H = T⁵ + T³.

        Attention and its residual are a sublayer, the feed-forward and its residual another.
        """
        for sublayer in block.sublayers:
            x_nd = self.each(add, *self.terms(x_nd, sublayer), x_nd)  # T³ = T² + X; H = T⁵ + T³
        if block.scale != 1:
            x_nd = self.each(lambda x: x * block.scale, x_nd)
        return x_nd

    @shown
    def terms(self, x_nd: Rows, sublayer: SublayerWeights) -> list[Rows]:
        """What a sublayer adds to X: its branches, or their sum after a norm."""
        t_nd, added = x_nd, []
        for branch in sublayer.branches:
            if branch.norm is not None:
                t_nd = self.norm(x_nd, branch.norm)  # T¹ = norm(X); T⁴ = norm(T³)
            elif not branch.config.shares_norm:
                t_nd = x_nd
            y_nd = self.branch(t_nd, branch)  # T² = attention(T¹); T⁵ = FFN(T⁴)
            added.append(y_nd)
        if sublayer.sum_norm is None:
            return added
        return [self.norm(self.each(add, *added), sublayer.sum_norm)]

    def branch(self, t_nd: Rows, branch: BranchWeights) -> Rows:
        """`multiplier · post(part(T))`."""
        match branch.part:
            case AttentionWeights() as part:
                y_nd = self.attention(t_nd, part)
            case MlpWeights() as part:
                y_nd = self.feed_forward(t_nd, part)
        if branch.post is not None:
            y_nd = self.norm(y_nd, branch.post)
        factor = branch.config.multiplier
        return y_nd if factor == 1 else self.each(lambda y: y * factor, y_nd)

    @shown
    def attention(self, t_nd: Rows, layer: AttentionWeights) -> Rows:
        """The heads' contexts side by side, times their gates where there are any, times W_o."""
        c_nc = self.contexts(t_nd, layer)
        if layer.gate is not None:
            g_nc = self.product(t_nd, layer.gate)
            c_nc = self.each(lambda g, c: sigmoid(g) * c, g_nc, c_nc)  # σ(G) ∘ C
        y_nd = self.product(c_nc, layer.o)  # C W_o
        return y_nd

    @shown
    def feed_forward(self, t_nd: Rows, layer: MlpWeights) -> Rows:
        """Each layer `Activation(X W + B)`, no activation after the last."""
        config = layer.config
        u_nf = self.product(t_nd, layer.up)  # U = T W_up + B
        if layer.gate is None:
            l_nf = self.each(ACTIVATIONS[config.activation], u_nf)
            return self.product(l_nf, layer.down)  # L W_down + B
        g_nf = self.product(t_nd, layer.gate)  # G = T W_gate + B
        l_nf = self.each(lambda g, u: gated(g, u, config), g_nf, u_nf)  # Activation(G) ∘ U
        return self.product(l_nf, layer.down)  # L W_down + B

    @shown
    def logits(self, h_nd: Rows) -> Rows:
        """`H′ W_head`, soft-capped or scaled where the model does that."""
        cap, scale = self.config.head.cap, self.config.head.scale
        logits_nv = self.product(h_nd, self.weights.head)
        if cap is not None:
            logits_nv = self.each(lambda x: soft_cap(x, cap), logits_nv)
        if cap is None and scale != 1:
            logits_nv = self.each(lambda x: x * scale, logits_nv)
        return logits_nv

    # Positions.

    @property
    def positions(self) -> Tensor:
        """Positions of the rows, `[n]`."""
        return torch.arange(self.first, self.first + self.count)

    def angles(self, rope: RopeConfig) -> tuple[Tensor, float]:
        """Radians per position of each pair of a head `[R/2]` in float64, and the factor on both.

        The length so far matters to the dynamic kinds only.
        """
        return frequencies(rope, self.first + self.count)

    def turns(self, rope: RopeConfig) -> Turns:
        """cos and sin of every position and pair, `[n, R/2]`: computed once for all layers.

        To compute them in every layer would be half of the time of some rungs.
        """
        if rope not in self._turns:
            per_position, factor = self.angles(rope)
            turns = torch.outer(self.positions.double(), per_position)
            like = self.weights.W_E
            self._turns[rope] = (turns.cos() * factor).to(like), (turns.sin() * factor).to(like)
        return self._turns[rope]


# Arithmetic of floats or of tensors.


def either(of_float: Function, of_tensor: Function) -> Function:
    """The function of the first argument's type."""
    return lambda x, *more: (of_float if isinstance(x, float) else of_tensor)(x, *more)


tanh = either(math.tanh, torch.tanh)
erf = either(math.erf, torch.erf)
clip = either(lambda x, low, high: min(max(x, low), high), torch.clamp)


def add(*terms: Any) -> Any:
    """The sum, from the left."""
    return reduce(operator.add, terms)


def sigmoid(x: Any) -> Any:
    """`1 / (1 + exp(-x))`, written so that nothing overflows."""
    return 0.5 * (1 + tanh(0.5 * x))


def soft_cap(x: Any, cap: float) -> Any:
    """`cap · tanh(x / cap)`: about x near 0, and never beyond ±cap."""
    return cap * tanh(x / cap)


# what each neuron does with its sum
ACTIVATIONS: dict[Activation, Function] = {
    "silu": lambda x: x * sigmoid(x),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "sigmoid": sigmoid,
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: clip(x, 0.0, math.inf),
    "relu2": lambda x: clip(x, 0.0, math.inf) ** 2,
}


def gated(gate: Any, up: Any, config: MlpConfig) -> Any:
    """`Activation(gate) · up`, both within bounds where the model clamps them."""
    if (clamp := config.clamp) is not None:
        gate = clip(gate, -math.inf, clamp.limit)
        up = clip(up, -clamp.limit, clamp.limit) + clamp.offset
    return ACTIVATIONS[config.activation](gate) * up


# What the rungs from 2 on do with tensors.


@shown
def times(x_ni: Tensor, matrix: Matrix) -> Tensor:
    """`X W + B`: all neurons of a row (GEMV) or of all rows (GEMM), b added to every row."""
    y_nj = x_ni @ matrix.W
    if matrix.b is not None:
        y_nj = y_nj + matrix.b
    return y_nj


@shown_last
def normalized(x_ni: Tensor, norm: NormWeights) -> Tensor:
    """Each row: LayerNorm `(x − μ)/√(σ² + ε) · w + b`, RMSNorm `x/√(mean(x²) + ε) · w`."""
    if norm.config.kind == "layer":
        mean_n1 = x_ni.mean(-1, keepdim=True)  # μ
        x_ni = x_ni - mean_n1
    square_n1 = (x_ni * x_ni).mean(-1, keepdim=True)  # σ², or mean(x²)
    y_ni = x_ni / (square_n1 + norm.config.eps).sqrt()
    if (factor := norm.factor) is not None:
        y_ni = factor * y_ni  # · w
    if norm.b is not None:
        y_ni = y_ni + norm.b
    return y_ni


@shown
def rotated(x_nk: Tensor, cos_nj: Tensor, sin_nj: Tensor) -> Tensor:
    """R(position) x: two halves of a head turned against each other, the rest as it is."""
    half = cos_nj.shape[-1]
    a, b, rest = x_nk.tensor_split((half, 2 * half), -1)
    y_nk = torch.cat((a * cos_nj - b * sin_nj, b * cos_nj + a * sin_nj, rest), -1)
    return y_nk


@shown_last
def softmax(s_nm: Tensor, sink: Tensor | None = None) -> Tensor:
    """Each row `exp(s) / Σ exp(s)`; its largest is subtracted first so that nothing overflows.

    A `sink` `[…, 1, 1]` is one score more in the sum of each row.
    """
    largest = s_nm.max(-1, keepdim=True).values
    if sink is not None:
        largest = torch.maximum(largest, sink)
    p_nm = (s_nm - largest).exp()
    sum_n1 = p_nm.sum(-1, keepdim=True)
    if sink is not None:
        sum_n1 = sum_n1 + (sink - largest).exp()
    return p_nm / sum_n1
