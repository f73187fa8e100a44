"""The algebra that models are described in: what makes one activation of others. No torch.

An op says what it reads, its formula in the letters of the tensors that it reads, and the FLOPs of
its matrix products. How it is evaluated, how one number of it is derived and how far a kernel may
round it is said in `graph.evaluation`, by type.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from llmcli.graph.spec import Call
from llmcli.parts.attention.config import QueryGrowth, RopeConfig
from llmcli.parts.latent.config import LatentConfig
from llmcli.parts.mlp.config import Activation, GateClamp
from llmcli.parts.norm.config import NormConfig

Letter = Callable[[str], str]  # the letter of an activation or a parameter, by its name
Sizes = Mapping[str, int]  # of axes, by their letters

FUNCTIONS: dict[Activation, str] = {
    "silu": "SiLU",
    "gelu": "GELU",
    "gelu_tanh": "GELU_tanh",
    "quick_gelu": "QuickGELU",
    "relu": "ReLU",
    "sigmoid": "σ",
    "relu2": "ReLU²",
}


def size(axis: str, sizes: Sizes) -> int:
    """Of an axis, or of two that lie in one: `H·dh`."""
    return prod(sizes[letter] for letter in axis.split("·"))


@dataclass(frozen=True, kw_only=True)
class Op(ABC):
    """How an activation follows from others."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """The activations that it is computed from, in the order of the formula."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Those that a kernel reads for it: not what it computes on the way, nor a cache."""
        return self.inputs

    @abstractmethod
    def formula(self, own: str, letter: Letter) -> str:
        """The formula, `own` being the letter of what it makes."""

    def flops(self, call: Call, tokens: int, sizes: Sizes) -> tuple[int, int]:
        """FLOPs of the matrix products for `tokens` positions of each sequence of a call.

        2 a multiply-add. The second number is the part of them that a mask hides.
        """
        return 0, 0

    @property
    def by_rows(self) -> bool:
        """Whether a row costs many multiplications, and knows nothing of other queries' rows."""
        return False

    @property
    def only_shown(self) -> bool:
        """Whether no model computes it on its way to the logits."""
        return False


@dataclass(frozen=True, kw_only=True)
class LookUp(Op):
    """`E = W_E[id]` or `P = W_P[position]`: a row of a table for every token, `[T, D]`.

    Times `scale`, which is `rounded` to the dtype of the table, where that has 16 bits. Where rows
    are cut into `heads` it is `[H, T, d]`.
    """

    table: str
    by_position: bool
    scale: float = 1.0
    rounded: bool = False
    heads: int = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """None: this is where a derivation ends."""
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

    `before` are all that the stream has been made of so far. A single part is a copy. `scale`
    multiplies the sum, and so does the one number of the parameter `weight`. `also`: what it is
    called elsewhere.
    """

    parts: tuple[str, ...]
    before: tuple[str, ...]
    scale: float = 1.0
    weight: str | None = None
    also: str = ""

    @property
    def plain(self) -> bool:
        """Whether nothing multiplies the sum."""
        return self.scale == 1 and self.weight is None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The parts that are added."""
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
        """What is capped."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`logits = 30 · tanh(logits_raw / 30)`."""
        return f"{own} = {self.cap:g} · tanh({letter(self.source)} / {self.cap:g})"


@dataclass(frozen=True, kw_only=True)
class Project(Op):
    """`Q = T¹ W_q + b_q`: every number is a row times a column, plus a bias.

    `over` is the axis of the rows' numbers, `columns` that of the matrix's columns. `heads`: the
    columns are cut into so many heads, `[H, T, d]` (0: `[T, N]`), each called `head`. An input
    `[H, T, e]` is put together to `[T, H·e]` first. `fused`: what one product gives for several
    such ops, by its name. `remark` is added to the formula.
    """

    source: str
    weight: str
    over: str
    columns: str
    bias: str | None = None
    heads: int = 0
    head: str = "head"
    fused: str = ""
    remark: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The rows."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`Q = T¹ W_q + b_q`."""
        bias = f" + {letter(self.bias)}" if self.bias else ""
        return f"{own} = {letter(self.source)} {letter(self.weight)}{bias}{self.remark}"

    def flops(self, call: Call, tokens: int, sizes: Sizes) -> tuple[int, int]:
        """Of `X W`."""
        matrix = size(self.over, sizes) * size(self.columns, sizes)
        return 2 * call.batch * tokens * matrix, 0

    @property
    def by_rows(self) -> bool:
        """A row costs as many multiplications as the matrix has numbers."""
        return True


@dataclass(frozen=True, kw_only=True)
class HeadShare(Op):
    """`C W_o`, head by head: what one head adds to the attention's output, `[H, T, D]`.

    `whole` is their sum, with a bias where there is one.
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
        """As the whole product."""
        return True

    @property
    def only_shown(self) -> bool:
        """Models compute the sum alone."""
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
        """`s = √(mean(X²) + ε)`, `(T³)²` where a letter has a number above it."""
        x = letter(self.source)
        squared = f"{x}²" if len(x) == 1 else f"({x})²"
        return f"{own} = √(mean({f'({x} − μ)²' if self.norm.kind == 'layer' else squared}) + ε)"


@dataclass(frozen=True, kw_only=True)
class Normalize(Op):
    """`T¹ = (X − μ) / s · w + b` (RMSNorm: `X / s · w`), the shape of X.

    `joined`: the numbers of all heads of a token are one row. `groups`: so many parts of a row are
    normalized each by itself.
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
    """`Q_rot = R(position) Q`: number i of a head is turned against number i + R/2."""

    source: str
    rope: RopeConfig

    @property
    def inputs(self) -> tuple[str, ...]:
        """What is rotated."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`Q_rot = R(position) Q`."""
        return f"{own} = R(position) {letter(self.source)}"


@dataclass(frozen=True, kw_only=True)
class Join(Op):
    """`Q_rot = [Q | Q_pe_rot]`: numbers of a head behind each other, `[H, T, d]`.

    `end` may be `[T, e]`, the same for all heads.
    """

    start: str
    end: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Both of them."""
        return (self.start, self.end)

    def formula(self, own: str, letter: Letter) -> str:
        """`Q_rot = [Q | Q_pe_rot]`."""
        return f"{own} = [{letter(self.start)} | {letter(self.end)}]"


@dataclass(frozen=True, kw_only=True)
class Score(Op):
    """`S = Q Kᵀ / √(d/h) + M`, `[H, T, S]`: −∞ for keys that a query may not look at.

    `group` query heads share a key head of `head_dim` numbers. `window`: a query sees so many keys,
    itself included (None: all before it). `root` is how the formula writes √head_dim. With a `cap`
    c a scaled score s is `c · tanh(s / c)`. `growth`: queries count more at later positions.
    """

    query: str
    key: str
    scale: float
    head_dim: int
    group: int
    window: int | None
    root: str
    cap: float | None = None
    growth: QueryGrowth | None = None

    def factor(self, position: int) -> float:
        """What the scores of a query at that position are multiplied by."""
        return self.scale * (1.0 if self.growth is None else self.growth.at(position))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Queries and keys."""
        return (self.query, self.key)

    @property
    def usual(self) -> bool:
        """Whether scores are divided by the root of a head's size, as nearly everywhere."""
        return math.isclose(self.scale, self.head_dim**-0.5, rel_tol=1e-12)

    def product(self, letter: Letter) -> str:
        """`Q Kᵀ / √(d/h) + M`: √d_k where heads are no parts of the width, or the own scale."""
        scaled = f" / {self.root}" if self.usual else f" · {self.scale:g}" * (self.scale != 1)
        product = f"{letter(self.query)} {letter(self.key)}ᵀ{scaled}"
        if (grown := self.growth) is not None:
            product += f" · (1 + {grown.beta:g} · ln(1 + ⌊position / {grown.original}⌋))"
        if self.cap is not None:
            product = f"{self.cap:g} · tanh({product} / {self.cap:g})"
        return f"{product} + M"

    def formula(self, own: str, letter: Letter) -> str:
        """`S = Q Kᵀ / √(d/h) + M`."""
        return f"{own} = {self.product(letter)}"

    @property
    def by_rows(self) -> bool:
        """A row costs as many multiplications as the keys have numbers."""
        return True


@dataclass(frozen=True, kw_only=True)
class Softmax(Op):
    """`A = softmax(S)` row by row, with the row's maximum taken off first, `[H, T, S]`.

    `sink`: a parameter `[H]`, for every head one score more in each of its rows. What it takes is
    no key's weight, so that those of a row sum to less than 1 (gpt-oss).
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
        """With its scores."""
        return True


@dataclass(frozen=True, kw_only=True)
class Mix(Op):
    """`C = A V`: for every query the values of all keys, each times its weight, `[H, T, e]`.

    A fused kernel computes it from queries, and keys and values in the cache, by itself: `query` is
    what it reads, and its FLOPs are those of the scores, too. `latent`: the cache has latents.

    `signed`: the map has numbers of both signs, and its rows any sum. A recurrence computes it with
    a `state` in the place of the map: so many `passes` over the axes that it has (`H·dk·dv`).
    """

    pattern: str
    value: str
    query: str
    group: int
    window: int | None
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
        """Of `Q Kᵀ` and `A V` as full rectangles, and what of them lies behind the mask."""
        if self.state:
            return 2 * call.batch * tokens * self.passes * size(self.state, sizes), 0
        if self.latent is not None:
            full, per_pair = (call.batch * n for n in self.latent.flops(tokens, call.keys))
            hidden = tokens * call.keys - visible_pairs(tokens, call.past, None)
            return full, per_pair * hidden
        # a map that is not of queries and keys has no `dh`
        per_pair = 2 * call.batch * sizes["H"] * (sizes.get("dh", 0) + sizes["dv"])
        pairs = tokens * call.keys
        return per_pair * pairs, per_pair * (pairs - visible_pairs(tokens, call.past, self.window))

    @property
    def by_rows(self) -> bool:
        """A row costs as many multiplications as the values have numbers."""
        return True


@dataclass(frozen=True, kw_only=True)
class Activate(Op):
    """`Activation(U)`, or of the gate `Activation(G)`, number by number, `[T, F]`.

    `limit`: of the smaller of it and the number.
    """

    source: str
    function: Activation
    limit: float | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """What goes into the function."""
        return (self.source,)

    def formula(self, own: str, letter: Letter) -> str:
        """`L = Activation(U) = GELU(U)`, or `Activation(G) = SiLU(G)`."""
        x = letter(self.source)
        activated = f"Activation({x})"
        first = own if own == activated else f"{own} = {activated}"
        bounded = x if self.limit is None else f"min({x}, {self.limit:g})"
        return f"{first} = {FUNCTIONS[self.function]}({bounded})"


@dataclass(frozen=True, kw_only=True)
class Gate(Op):
    """`L = Activation(G) ∘ U`, number by number, `[T, F]`; with a `clamp` c ∘ (clip(U, ±c) + o).

    A gate `[T, 1]` is of the whole row. `item`: of `up`, which is `[L, T, F]`, that one is taken.
    """

    act: str
    up: str
    clamp: GateClamp | None = None
    item: int | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The activated gate and what goes through it."""
        return (self.act, self.up)

    def formula(self, own: str, letter: Letter) -> str:
        """`L = Activation(G) ∘ U`, or `L = Activation(G) ∘ (clip(U, ±7) + 1)`."""
        up = letter(self.up) + ("" if self.item is None else f"[{self.item}]")
        if self.clamp is not None:
            up = f"(clip({up}, ±{self.clamp.limit:g}) + {self.clamp.offset:g})"
        return f"{own} = {letter(self.act)} ∘ {up}"


@dataclass(frozen=True, kw_only=True)
class Convolve(Op):
    """`Z[t] = Σ_j w[j] ∘ Y[t − L + 1 + j] + b`: of the last L = `length` tokens, `[T, D]`.

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
    """What is evaluated as a whole: there is no derivation of single numbers yet.

    `text` is the formula behind the equals sign. `evaluate` names `module:function` of a part's own
    folder: the op and `Numbers` → the activation, and how large what is added up to each number is
    (`Rule.tensor` and `Rule.magnitudes`). A token costs as many multiplications as the axes
    `multiplies` have places (`E·D·F`).
    """

    sources: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    text: str
    evaluate: str
    multiplies: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """As they are given."""
        return self.sources

    def formula(self, own: str, letter: Letter) -> str:
        """`N = λ N[t−1] + V`."""
        return f"{own} = {self.text}"

    def flops(self, call: Call, tokens: int, sizes: Sizes) -> tuple[int, int]:
        """Of the products inside."""
        each = size(self.multiplies, sizes) if self.multiplies else 0
        return 2 * call.batch * tokens * each, 0


def visible_pairs(tokens: int, past: int, window: int | None) -> int:
    """How many (query, key) pairs a causal mask with an optional window leaves.

    A query at position p sees p + 1 keys, or the last `window` of them, itself included.
    """
    if window is None or window >= past + tokens:
        return tokens * past + tokens * (tokens + 1) // 2
    growing = max(0, min(tokens, window - past))  # queries that still see every key before them
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * window


def visible_keys(call: Call, window: int | None) -> int:
    """How many keys of each sequence at least one new token sees: all, or the last ones."""
    return call.keys if window is None else min(call.keys, call.tokens + window - 1)
