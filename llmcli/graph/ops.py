"""The algebra of models: ops that compute one activation from others.

No torch. An op has inputs, a formula in the symbols of its inputs, and the FLOPs of its matrix
products. Its evaluation, derivations and rounding bounds are in `evaluate`, by type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import ClassVar

from llmcli.config.attention import RopeConfig, ScoreConfig, Window, visible_pairs
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import ACTIVATIONS, Activation, GateClamp
from llmcli.config.norm import HeadNorm, NormConfig
from llmcli.graph.spec import Call

Letter = Callable[[str], str]  # the letter of an activation or a parameter, by its name
Sizes = Mapping[str, int]  # of axes, by their letters


def size(axis: str, sizes: Sizes) -> int:
    """The size of an axis, of a product such as `H·dh`, or of segments: `H·dv|G·N|G·N`."""
    return sum(prod(sizes[letter] for letter in segment.split("·")) for segment in axis.split("|"))


class _Letters:
    """An op's fields for a format string: the letters of its tensors, and its numbers."""

    def __init__(self, op: Op, letter: Letter) -> None:
        self.op, self.letter = op, letter

    def __getitem__(self, field: str) -> object:
        value = attrgetter(field)(self.op)
        return self.letter(value) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class Op:
    """The computation of an activation from others.

    `INPUTS`: the fields with its input activations, in the order of the formula. `FORM`: the right
    side of its formula as a format string of its fields, where it is constant. `multiplies`: axes
    whose product is the multiplications per token in matrix products. `by_rows`: a row is expensive
    (a multiplication per number of a matrix, or of all earlier tokens), and independent of other
    queries' rows. `tap_only`: models do not compute the activation, it is not needed for logits.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("source",)
    FORM: ClassVar[str] = ""
    by_rows: ClassVar[bool] = False
    tap_only: ClassVar[bool] = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input activations, in the order of the formula."""
        return tuple(filter(None, (attrgetter(field)(self) for field in self.INPUTS)))

    @property
    def reads(self) -> tuple[str, ...]:
        """Inputs that a kernel reads: without intermediate values and caches."""
        return self.inputs

    @property
    def multiplies(self) -> str:
        """See `Op`; empty without matrix products."""
        return ""

    def formula(self, own: str, letter: Letter) -> str:
        """The formula, with `own` as the symbol of the result."""
        return f"{own} = {self.right_side(own, letter)}"

    def right_side(self, own: str, letter: Letter) -> str:
        """The formula without its result `own`."""
        return self._form().format_map(_Letters(self, letter))

    def _form(self) -> str:
        return self.FORM

    def flops(self, call: Call, tokens: int, sizes: Sizes) -> tuple[int, int]:
        """FLOPs of the matrix products for `tokens` positions of each sequence of a call.

        2 per multiply-add. Returns (total, the part spent on masked cells).
        """
        each = size(self.multiplies, sizes) if self.multiplies else 0
        return 2 * call.batch * tokens * each, 0


@dataclass(frozen=True, kw_only=True)
class LookUp(Op):
    """`E = W_E[id]` or `P = W_P[position]`: a row of a table for every token, `[T, D]`.

    Times `scale`, which is `rounded` to the table's dtype if that has 16 bits. With `heads` the
    rows are split to `[H, T, d]`. A derivation ends here: it has no inputs.
    """

    INPUTS = ()
    table: str
    by_position: bool
    scale: float = 1.0
    rounded: bool = False
    heads: int = 0

    def _form(self) -> str:
        row = "{table}[position]" if self.by_position else "{table}[id]"
        remark = ", the factor in the table's dtype" if self.rounded else ""
        return row if self.scale == 1 else f"{self.scale:g} · {row}{remark}"


@dataclass(frozen=True, kw_only=True)
class Add(Op):
    """`X = H of block 0 = T⁵ + T³`: parts of the residual stream, `[T, D]` each.

    `before`: all earlier parts of the stream. A single part is a copy. `scale` and the scalar
    parameter `weight` multiply the sum. `also`: another symbol of the result.
    """

    parts: tuple[str, ...]
    before: tuple[str, ...]
    scale: float = 1.0
    weight: str | None = None
    also: str = ""

    @property
    def plain(self) -> bool:
        """Whether the sum has no factor."""
        return self.scale == 1 and self.weight is None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The parts of the sum."""
        return self.parts

    def right_side(self, own: str, letter: Letter) -> str:
        """`H of block 0 = T⁵ + T³`, or `2 · c · (T⁵ + T³)`."""
        total = " + ".join(map(letter, self.parts))
        total = f"({total})" if len(self.parts) > 1 and not self.plain else total
        scale = f"{self.scale:g} · " if self.scale != 1 else ""
        weight = f"{letter(self.weight)} · " if self.weight else ""
        return (f"{self.also} = " if self.also else "") + scale + weight + total


@dataclass(frozen=True, kw_only=True)
class SoftCap(Op):
    """`logits = c · tanh(X / c)`, number by number, the shape of X."""

    FORM = "{cap:g} · tanh({source} / {cap:g})"
    source: str
    cap: float


@dataclass(frozen=True, kw_only=True)
class Project(Op):
    """`Q = T¹ W_q + b_q`: every number is a row times a column, plus a bias.

    `over`: the axis of the row; `columns`: the axis of the matrix's columns. `heads`: number of
    heads that the columns are split into, `[H, T, d]` (0: `[T, N]`), each called `head`. An input
    `[H, T, e]` is concatenated to `[T, H·e]` first. `fused`: name of the combined product of
    several such ops. `clip`: largest magnitude of a result. `remark` is appended to the formula.
    """

    by_rows = True
    source: str
    weight: str
    over: str
    columns: str
    bias: str | None = None
    heads: int = 0
    head: str = "head"
    fused: str = ""
    clip: float | None = None
    remark: str = ""

    @property
    def multiplies(self) -> str:
        """The numbers of the matrix."""
        return f"{self.over}·{self.columns}"

    def _form(self) -> str:
        product = "{source} {weight}" + (" + {bias}" if self.bias else "")
        product = product if self.clip is None else f"clip({product}, ±{self.clip:g})"
        return f"{product}{self.remark}"


@dataclass(frozen=True, kw_only=True)
class HeadShare(Op):
    """`R = C W_o, head by head (T² is their sum + b_o)`: a head's part of a result, `[H, T, D]`.

    `whole` is their sum, plus the bias if there is one; models only compute the sum.
    """

    by_rows = tap_only = True
    source: str
    weight: str
    whole: str
    bias: str | None = None

    def _form(self) -> str:
        bias = " + {bias}" if self.bias else ""
        return "{source} {weight}, head by head ({whole} is their sum" + f"{bias})"


@dataclass(frozen=True, kw_only=True)
class Scale(Op):
    """`s = √(mean((X − μ)²) + ε)` of every row (RMSNorm: without μ), `[…, 1]`."""

    source: str
    norm: NormConfig

    def right_side(self, own: str, letter: Letter) -> str:
        """`√(mean(X²) + ε)`, with `(T³)²` for a symbol with a superscript."""
        x = letter(self.source)
        squared = f"{x}²" if len(x) == 1 else f"({x})²"
        return f"√(mean({f'({x} − μ)²' if self.norm.kind == 'layer' else squared}) + ε)"


@dataclass(frozen=True, kw_only=True)
class Normalize(Op):
    """`T¹ = LayerNorm(X) = (X − μ) / s · w + b`, or `RMSNorm(X) = X / s · w`, the shape of X.

    `joined`: all heads of a token form one row. `groups`: number of parts of a row that are
    normalized separately. `clip`: largest magnitude of a result.
    """

    source: str
    norm: NormConfig
    weight: str | None
    bias: str | None = None
    joined: bool = False
    groups: int = 1
    clip: float | None = None

    def _form(self) -> str:
        rms = self.norm.kind == "rms"
        named = "RMSNorm({source}) = " if rms else "LayerNorm({source}) = "
        bias, all_heads = " + b" if self.bias else "", ", s of all heads" if self.joined else ""
        if self.groups > 1:
            all_heads = f", s of each of {self.groups} groups"
        if isinstance(self.norm, HeadNorm):
            all_heads = ", w of the head"
        w = f" · ({self.norm.offset:g} + w)" if self.norm.offset else " · w"
        row = "{source}" if rms else "({source} − μ)"
        normed = f"{row} / s{w if self.weight else ''}{bias}"
        clipped = "" if self.clip is None else f"clip({normed}, ±{self.clip:g})"
        return f"{clipped or named + normed}{all_heads}"


@dataclass(frozen=True, kw_only=True)
class Rotate(Op):
    """`Q_rot = R(position) Q`: dimension i of a head is paired with i + R/2."""

    FORM = "R(position) {source}"
    source: str
    rope: RopeConfig


@dataclass(frozen=True, kw_only=True)
class Join(Op):
    """`Q_rot = [Q | Q_pe_rot]`: concatenation within a head, `[H, T, d]`.

    `end` may be `[T, e]`, shared by all heads.
    """

    INPUTS = ("start", "end")
    FORM = "[{start} | {end}]"
    start: str
    end: str


@dataclass(frozen=True, kw_only=True)
class Score(Op):
    """`S = Q Kᵀ / √(d/h) + M`, `[H, T, S]`: −∞ for masked keys.

    `group` query heads share a key head of size `head_dim`. `root`: √head_dim as written in the
    formula.
    """

    INPUTS = ("query", "key")
    by_rows = True
    query: str
    key: str
    config: ScoreConfig
    head_dim: int
    group: int
    root: str

    def factor(self, position: int) -> float:
        """The factor on the scores of a query at `position`."""
        growth = self.config.growth
        return self.config.scale * (1.0 if growth is None else growth.at(position))

    @property
    def usual(self) -> bool:
        """Whether the scale is the usual 1 / √head_dim."""
        return math.isclose(self.config.scale, self.head_dim**-0.5, rel_tol=1e-12)

    def _form(self) -> str:
        """`Q Kᵀ / √(d/h) + M`: √d_k if heads do not divide the width, or a custom scale."""
        own = self.config
        scaled = f" / {self.root}" if self.usual else f" · {own.scale:g}" * (own.scale != 1)
        product = "{query} {key}ᵀ" + scaled
        if (grown := own.growth) is not None:
            at = f"(position + {grown.first})" if grown.first else "position"
            product += f" · (1 + {grown.beta:g} · ln(1 + ⌊{at} / {grown.original}⌋))"
        if own.slopes:
            product += " − slope · distance"
        if own.cap is not None:
            product = f"{own.cap:g} · tanh({product} / {own.cap:g})"
        return f"{product} + M"


@dataclass(frozen=True, kw_only=True)
class Softmax(Op):
    """`A = softmax(S)` row by row after subtracting the row's maximum, `[H, T, S]`.

    `sink`: a parameter `[H]`, an additional score in every row of a head. Its weight belongs to no
    key, so the weights of a row sum to less than 1 (gpt-oss).
    """

    by_rows = True
    source: str
    sink: str | None = None

    def right_side(self, own: str, letter: Letter) -> str:
        """`softmax(S)`."""
        return self.of(letter(self.source), letter)

    def of(self, scores: str, letter: Letter) -> str:
        """`softmax(S)`, or `softmax([S, sink]) without the sink's column`."""
        if self.sink is None:
            return f"softmax({scores})"
        return f"softmax([{scores}, {letter(self.sink)}]) without the sink's column"


@dataclass(frozen=True, kw_only=True)
class Mix(Op):
    """`C = A V`: per query, the weighted sum of all keys' values, `[H, T, e]`.

    A fused kernel computes it from `query` and the cached keys and values; the FLOPs include those
    of the scores. `latent`: the cache has latents.

    `signed`: the map has both signs, and rows of any sum. A recurrence computes it with a `state`
    instead of the map, in `passes` passes over the state's axes (`H·dk·dv`).
    """

    INPUTS = ("pattern", "value")
    FORM = "{pattern} {value}"
    by_rows = True
    pattern: str
    value: str
    query: str
    group: int
    window: Window | None
    latent: LatentConfig | None = None
    signed: bool = False
    state: str = ""
    passes: int = 0

    @property
    def reads(self) -> tuple[str, ...]:
        """The queries; keys and values are in the cache."""
        return (self.query,)

    def flops(self, call: Call, tokens: int, sizes: Sizes) -> tuple[int, int]:
        """FLOPs of `Q Kᵀ` and `A V` as full rectangles, and their masked part."""
        if self.state:
            return 2 * call.batch * tokens * self.passes * size(self.state, sizes), 0
        pairs = tokens * call.keys
        hidden = pairs - visible_pairs(tokens, call.past, self.window)
        if self.latent is not None:
            full, per_pair = (call.batch * n for n in self.latent.flops(tokens, call.keys))
            return full, per_pair * hidden
        # a map not computed from queries and keys has no `dh`
        per_pair = 2 * call.batch * sizes["H"] * (sizes.get("dh", 0) + sizes["dv"])
        return per_pair * pairs, per_pair * hidden


@dataclass(frozen=True, kw_only=True)
class Activate(Op):
    """`L = Activation(U) = GELU(U)`, or of the gate `Activation(G)`, number by number, `[T, F]`.

    `limit`: upper bound on the input.
    """

    source: str
    function: Activation
    limit: float | None = None

    def right_side(self, own: str, letter: Letter) -> str:
        """`Activation(U) = GELU(U)`; `SiLU(G)` if `own` is `Activation(G)`."""
        x = letter(self.source)
        first = "" if own == f"Activation({x})" else f"Activation({x}) = "
        bounded = x if self.limit is None else f"min({x}, {self.limit:g})"
        return f"{first}{ACTIVATIONS[self.function]}({bounded})"


@dataclass(frozen=True, kw_only=True)
class Gate(Op):
    """`L = Activation(G) ∘ U`, number by number, `[T, F]`; with a `clamp` c ∘ (clip(U, ±c) + o).

    A gate `[T, 1]` applies to the whole row. `item`: index into `up`, which is then `[L, T, F]`.
    """

    INPUTS = ("act", "up")
    act: str
    up: str
    clamp: GateClamp | None = None
    item: int | None = None

    def _form(self) -> str:
        up = "{up}" + ("" if self.item is None else f"[{self.item}]")
        if self.clamp is not None:
            up = f"(clip({up}, ±{self.clamp.limit:g}) + {self.clamp.offset:g})"
        return "{act} ∘ " + up


@dataclass(frozen=True, kw_only=True)
class Convolve(Op):
    """`Z[t] = Σ_j w[j] ∘ Y[t − L + 1 + j] + b`: over the last L = `length` tokens, `[T, D]`.

    Causal and depthwise, with zeros before the first token. Its formula is `Z = w ∗ Y + b`.
    """

    source: str
    weight: str
    bias: str | None
    length: int

    def _form(self) -> str:
        return "{weight} ∗ {source}" + (" + {bias}" if self.bias else "")


@dataclass(frozen=True, kw_only=True)
class Opaque(Op):
    """An op evaluated as a whole, without a derivation of single numbers.

    `text`: the right side of the formula. `evaluate`: `module:function` in the part's folder, which
    maps the op and `Numbers` to the activation and its magnitudes (`Rule.tensor` and
    `Rule.magnitudes`). `multiplies`: see `Op` (`E·D·F`).
    """

    sources: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    text: str
    evaluate: str
    multiplies: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The sources."""
        return self.sources

    def right_side(self, own: str, letter: Letter) -> str:
        """`λ N[t−1] + V`."""
        return self.text
