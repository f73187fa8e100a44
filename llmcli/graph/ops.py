"""The algebra of models: ops that compute one activation from others.

No torch. An op has inputs, a formula in the symbols of its inputs, and the FLOPs of its matrix
products. Its evaluation, derivations and rounding bounds are in `evaluate`, by type.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from llmcli.config.attention import Chunk, RopeConfig, ScoreConfig, Window, first_key
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import ACTIVATIONS, Activation, GateClamp
from llmcli.config.norm import NormConfig
from llmcli.graph.spec import Call

Letter = Callable[[str], str]  # the letter of an activation or a parameter, by its name
Sizes = Mapping[str, int]  # of axes, by their letters


def size(axis: str, sizes: Sizes) -> int:
    """The size of an axis, of a product such as `H·dh`, or of segments: `H·dv|G·N|G·N`."""
    return sum(
        prod(sizes[letter] for letter in segment.split("·")) for segment in axis.split("|")
    )


@dataclass(frozen=True, kw_only=True)
class Op(ABC):
    """The computation of an activation from others."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """The input activations, in the order of the formula."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Inputs that a kernel reads: without intermediate values and caches."""
        return self.inputs

    @abstractmethod
    def formula(self, own: str, letter: Letter) -> str:
        """The formula, with `own` as the symbol of the result."""

    def flops(self, call: Call, tokens: int, sizes: Sizes) -> tuple[int, int]:
        """FLOPs of the matrix products for `tokens` positions of each sequence of a call.

        2 per multiply-add. Returns (total, the part spent on masked cells).
        """
        return 0, 0

    @property
    def by_rows(self) -> bool:
        """Whether a row is expensive and independent of other queries' rows."""
        return False

    @property
    def only_shown(self) -> bool:
        """Whether the activation is not needed for the logits."""
        return False


@dataclass(frozen=True, kw_only=True)
class LookUp(Op):
    """`E = W_E[id]` or `P = W_P[position]`: a row of a table for every token, `[T, D]`.

    Times `scale`, which is `rounded` to the table's dtype if that has 16 bits. With `heads` the
    rows are split to `[H, T, d]`.
    """

    table: str
    by_position: bool
    scale: float = 1.0
    rounded: bool = False
    heads: int = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """None: a derivation ends here."""
        return ()

    def formula(self, own: str, letter: Letter) -> str:
        """`E = W_E[id]` or `E = 45.25 · W_E[id]`."""
        scale = "" if self.scale == 1 else f"{self.scale:g} · "
        remark = ", the factor in the table's dtype" if scale and self.rounded else ""
        row = "position" if self.by_position else "id"
        return f"{own} = {scale}{letter(self.table)}[{row}]{remark}"


@dataclass(frozen=True, kw_only=True)
class Add(Op):
    """`T³ = T² + X`: parts of the residual stream, `[T, D]` each.

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

    def formula(self, own: str, letter: Letter) -> str:
        """`X = H of block 0 = T⁵ + T³`."""
        also = f"{self.also} = " if self.also else ""
        total = " + ".join(map(letter, self.parts))
        if not self.plain:
            factors = ([] if self.scale == 1 else [f"{self.scale:g}"]) + (
                [letter(self.weight)] if self.weight else []
            )
            total = f"({total})" if len(self.parts) > 1 else total
            total = " · ".join([*factors, total])
        return f"{own} = {also}{total}"


@dataclass(frozen=True, kw_only=True)
class SoftCap(Op):
    """`logits = c · tanh(X / c)`, number by number, the shape of X."""

    source: str
    cap: float

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input of the cap."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`logits = 30 · tanh(logits_raw / 30)`."""
        return f"{own} = {self.cap:g} · tanh({letter(self.source)} / {self.cap:g})"


@dataclass(frozen=True, kw_only=True)
class Project(Op):
    """`Q = T¹ W_q + b_q`: every number is a row times a column, plus a bias.

    `over`: the axis of the row; `columns`: the axis of the matrix's columns. `heads`: number of
    heads that the columns are split into, `[H, T, d]` (0: `[T, N]`), each called `head`. An input
    `[H, T, e]` is concatenated to `[T, H·e]` first. `fused`: name of the combined product of
    several such ops. `clip`: largest magnitude of a result. `remark` is appended to the formula.
    """

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
    def inputs(self) -> tuple[str, ...]:
        """The rows."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`Q = T¹ W_q + b_q`."""
        bias = f" + {letter(self.bias)}" if self.bias else ""
        product = f"{letter(self.source)} {letter(self.weight)}{bias}"
        product = product if self.clip is None else f"clip({product}, ±{self.clip:g})"
        return f"{own} = {product}{self.remark}"

    def flops(self, call: Call, tokens: int, sizes: Sizes) -> tuple[int, int]:
        """FLOPs of `X W`."""
        matrix = size(self.over, sizes) * size(self.columns, sizes)
        return 2 * call.batch * tokens * matrix, 0

    @property
    def by_rows(self) -> bool:
        """True: a row costs one multiplication per number of the matrix."""
        return True


@dataclass(frozen=True, kw_only=True)
class HeadShare(Op):
    """`C W_o`, head by head: the contribution of one head to the attention output, `[H, T, D]`.

    `whole` is their sum, plus the bias if there is one.
    """

    source: str
    weight: str
    whole: str
    bias: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The heads' results."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`R = C W_o, head by head (T² is their sum + b_o)`."""
        bias = f" + {letter(self.bias)}" if self.bias else ""
        shares = f"{own} = {letter(self.source)} {letter(self.weight)}, head by head"
        return f"{shares} ({letter(self.whole)} is their sum{bias})"

    @property
    def by_rows(self) -> bool:
        """True, as for the whole product."""
        return True

    @property
    def only_shown(self) -> bool:
        """True: models only compute the sum."""
        return True


@dataclass(frozen=True, kw_only=True)
class Scale(Op):
    """`s = √(mean((X − μ)²) + ε)` of every row (RMSNorm: without μ), `[…, 1]`."""

    source: str
    norm: NormConfig

    @property
    def inputs(self) -> tuple[str, ...]:
        """The rows."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`s = √(mean(X²) + ε)`, with `(T³)²` for a symbol with a superscript."""
        x = letter(self.source)
        squared = f"{x}²" if len(x) == 1 else f"({x})²"
        return f"{own} = √(mean({f'({x} − μ)²' if self.norm.kind == 'layer' else squared}) + ε)"


@dataclass(frozen=True, kw_only=True)
class Normalize(Op):
    """`T¹ = (X − μ) / s · w + b` (RMSNorm: `X / s · w`), the shape of X.

    `joined`: all heads of a token form one row. `groups`: number of parts of a row that are
    normalized separately.
    """

    source: str
    norm: NormConfig
    weight: str | None
    bias: str | None = None
    joined: bool = False
    groups: int = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        """The rows."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`T¹ = RMSNorm(X) = X / s · w` or `T¹ = LayerNorm(X) = (X − μ) / s · w + b`."""
        x = letter(self.source)
        kind = f"RMSNorm({x}) = {x}" if self.norm.kind == "rms" else f"LayerNorm({x}) = ({x} − μ)"
        bias, all_heads = " + b" if self.bias else "", ", s of all heads" if self.joined else ""
        if self.groups > 1:
            all_heads = f", s of each of {self.groups} groups"
        w = f" · ({self.norm.offset:g} + w)" if self.norm.offset else " · w"
        return f"{own} = {kind} / s{w if self.weight else ''}{bias}{all_heads}"


@dataclass(frozen=True, kw_only=True)
class Rotate(Op):
    """`Q_rot = R(position) Q`: dimension i of a head is paired with i + R/2."""

    source: str
    rope: RopeConfig

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input of the rotation."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`Q_rot = R(position) Q`."""
        return f"{own} = R(position) {letter(self.source)}"


@dataclass(frozen=True, kw_only=True)
class Join(Op):
    """`Q_rot = [Q | Q_pe_rot]`: concatenation within a head, `[H, T, d]`.

    `end` may be `[T, e]`, shared by all heads.
    """

    start: str
    end: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Start and end."""
        return (self.start, self.end)

    def formula(self, own: str, letter: Letter) -> str:
        """`Q_rot = [Q | Q_pe_rot]`."""
        return f"{own} = [{letter(self.start)} | {letter(self.end)}]"


@dataclass(frozen=True, kw_only=True)
class Score(Op):
    """`S = Q Kᵀ / √(d/h) + M`, `[H, T, S]`: −∞ for masked keys.

    `group` query heads share a key head of size `head_dim`. `root`: √head_dim as written in the
    formula.
    """

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
    def inputs(self) -> tuple[str, ...]:
        """Queries and keys."""
        return (self.query, self.key)

    @property
    def usual(self) -> bool:
        """Whether the scale is the usual 1 / √head_dim."""
        return math.isclose(self.config.scale, self.head_dim**-0.5, rel_tol=1e-12)

    def product(self, letter: Letter) -> str:
        """`Q Kᵀ / √(d/h) + M`: √d_k if heads do not divide the width, or a custom scale."""
        own = self.config
        scaled = f" / {self.root}" if self.usual else f" · {own.scale:g}" * (own.scale != 1)
        product = f"{letter(self.query)} {letter(self.key)}ᵀ{scaled}"
        if (grown := own.growth) is not None:
            at = f"(position + {grown.first})" if grown.first else "position"
            product += f" · (1 + {grown.beta:g} · ln(1 + ⌊{at} / {grown.original}⌋))"
        if own.slopes:
            product += " − slope · distance"
        if own.cap is not None:
            product = f"{own.cap:g} · tanh({product} / {own.cap:g})"
        return f"{product} + M"

    def formula(self, own: str, letter: Letter) -> str:
        """`S = Q Kᵀ / √(d/h) + M`."""
        return f"{own} = {self.product(letter)}"

    @property
    def by_rows(self) -> bool:
        """True: a row costs one multiplication per number of the keys."""
        return True


@dataclass(frozen=True, kw_only=True)
class Softmax(Op):
    """`A = softmax(S)` row by row after subtracting the row's maximum, `[H, T, S]`.

    `sink`: a parameter `[H]`, an additional score in every row of a head. Its weight belongs to no
    key, so the weights of a row sum to less than 1 (gpt-oss).
    """

    source: str
    sink: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The scores."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`A = softmax(S)`."""
        return f"{own} = {self.of(letter(self.source), letter)}"

    def of(self, scores: str, letter: Letter) -> str:
        """`softmax(S)`, or `softmax([S, sink]) without the sink's column`."""
        if self.sink is None:
            return f"softmax({scores})"
        return f"softmax([{scores}, {letter(self.sink)}]) without the sink's column"

    @property
    def by_rows(self) -> bool:
        """True, like its scores."""
        return True


@dataclass(frozen=True, kw_only=True)
class Mix(Op):
    """`C = A V`: per query, the weighted sum of all keys' values, `[H, T, e]`.

    A fused kernel computes it from `query` and the cached keys and values; the FLOPs include those
    of the scores. `latent`: the cache has latents.

    `signed`: the map has both signs, and rows of any sum. A recurrence computes it with a `state`
    instead of the map, in `passes` passes over the state's axes (`H·dk·dv`).
    """

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
    def inputs(self) -> tuple[str, ...]:
        """Pattern and values."""
        return (self.pattern, self.value)

    @property
    def reads(self) -> tuple[str, ...]:
        """The queries; keys and values are in the cache."""
        return (self.query,)

    def formula(self, own: str, letter: Letter) -> str:
        """`C = A V`."""
        return f"{own} = {letter(self.pattern)} {letter(self.value)}"

    def flops(self, call: Call, tokens: int, sizes: Sizes) -> tuple[int, int]:
        """FLOPs of `Q Kᵀ` and `A V` as full rectangles, and their masked part."""
        if self.state:
            return 2 * call.batch * tokens * self.passes * size(self.state, sizes), 0
        if self.latent is not None:
            full, per_pair = (call.batch * n for n in self.latent.flops(tokens, call.keys))
            hidden = tokens * call.keys - visible_pairs(tokens, call.past, None)
            return full, per_pair * hidden
        # a map not computed from queries and keys has no `dh`
        per_pair = 2 * call.batch * sizes["H"] * (sizes.get("dh", 0) + sizes["dv"])
        pairs = tokens * call.keys
        return per_pair * pairs, per_pair * (pairs - visible_pairs(tokens, call.past, self.window))

    @property
    def by_rows(self) -> bool:
        """True: a row costs one multiplication per number of the values."""
        return True


@dataclass(frozen=True, kw_only=True)
class Activate(Op):
    """`Activation(U)`, or of the gate `Activation(G)`, number by number, `[T, F]`.

    `limit`: upper bound on the input.
    """

    source: str
    function: Activation
    limit: float | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input of the function."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`L = Activation(U) = GELU(U)`, or `Activation(G) = SiLU(G)`."""
        x = letter(self.source)
        activated = f"Activation({x})"
        first = own if own == activated else f"{own} = {activated}"
        bounded = x if self.limit is None else f"min({x}, {self.limit:g})"
        return f"{first} = {ACTIVATIONS[self.function]}({bounded})"


@dataclass(frozen=True, kw_only=True)
class Gate(Op):
    """`L = Activation(G) ∘ U`, number by number, `[T, F]`; with a `clamp` c ∘ (clip(U, ±c) + o).

    A gate `[T, 1]` applies to the whole row. `item`: index into `up`, which is then `[L, T, F]`.
    """

    act: str
    up: str
    clamp: GateClamp | None = None
    item: int | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The activated gate and the gated input."""
        return (self.act, self.up)

    def formula(self, own: str, letter: Letter) -> str:
        """`L = Activation(G) ∘ U`, or `L = Activation(G) ∘ (clip(U, ±7) + 1)`."""
        up = letter(self.up) + ("" if self.item is None else f"[{self.item}]")
        if self.clamp is not None:
            up = f"(clip({up}, ±{self.clamp.limit:g}) + {self.clamp.offset:g})"
        return f"{own} = {letter(self.act)} ∘ {up}"


@dataclass(frozen=True, kw_only=True)
class Convolve(Op):
    """`Z[t] = Σ_j w[j] ∘ Y[t − L + 1 + j] + b`: over the last L = `length` tokens, `[T, D]`.

    Causal and depthwise, with zeros before the first token.
    """

    source: str
    weight: str
    bias: str | None
    length: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """The rows."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`Z = w ∗ Y`."""
        bias = f" + {letter(self.bias)}" if self.bias else ""
        return f"{own} = {letter(self.weight)} ∗ {letter(self.source)}{bias}"


@dataclass(frozen=True, kw_only=True)
class Opaque(Op):
    """An op evaluated as a whole, without a derivation of single numbers.

    `text`: the right side of the formula. `evaluate`: `module:function` in the part's folder, which
    maps the op and `Numbers` to the activation and its magnitudes (`Rule.tensor` and
    `Rule.magnitudes`). `multiplies`: axes whose product is the multiplications per token (`E·D·F`).
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

    def formula(self, own: str, letter: Letter) -> str:
        """`N = λ N[t−1] + V`."""
        return f"{own} = {self.text}"

    def flops(self, call: Call, tokens: int, sizes: Sizes) -> tuple[int, int]:
        """FLOPs of the products inside."""
        each = size(self.multiplies, sizes) if self.multiplies else 0
        return 2 * call.batch * tokens * each, 0


def visible_pairs(tokens: int, past: int, window: Window | None) -> int:
    """Number of (query, key) pairs not hidden by a causal mask with an optional window.

    A query at position p sees p + 1 keys, or the last `window` of them, itself included, or those
    of its chunk.
    """
    if isinstance(window, Chunk):
        size = window.size
        starts = ((end // size, end % size) for end in (past, past + tokens))
        whole = size * (size + 1) // 2
        before, after = (n * whole + rest * (rest + 1) // 2 for n, rest in starts)
        return after - before
    if window is None or window >= past + tokens:
        return tokens * past + tokens * (tokens + 1) // 2
    growing = max(0, min(tokens, window - past))  # queries that still see every key before them
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * window


def visible_keys(call: Call, window: Window | None) -> int:
    """Number of keys per sequence that at least one new token sees."""
    return call.keys if window is None else call.keys - max(0, first_key(call.past, window))
