"""Configuration of softmax attention and RoPE.

Letters: H heads, Hk key/value heads, dh size of a head's query and key, dv of its value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from llmcli.config.norm import NormConfig


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): divide every frequency by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Dynamic NTK: beyond `original` positions the base grows with the sequence length."""

    factor: float
    original: int


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth ramp between."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): interpolation by parts and a temperature.

    `attention_factor` multiplies cos and sin. `truncate` rounds the ramp's ends to whole
    dimensions, as the reference does.
    """

    factor: float
    original: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): one divisor per frequency, two sets.

    `short` applies up to `original` positions and `long` beyond; `attention_factor`
    multiplies cos and sin. `sources`: tensors of a GGUF file with `short` and `long`; the loader
    fills them in.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    attention_factor: float
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FrequencyFactors:
    """One divisor per frequency, from a GGUF file (`rope_freqs.weight`).

    `source` names the checkpoint tensor of `dims / 2` numbers; the loader fills `factors`.
    """

    source: str
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """Gemma 4: the first `pairs` are rotated as in a full head, the others not.

    Frequencies are divided by `factor`.
    """

    pairs: int
    factor: float = 1.0


RopeScaling = (
    LinearScaling
    | DynamicScaling
    | Llama3Scaling
    | YarnScaling
    | LongRopeScaling
    | FrequencyFactors
    | ProportionalScaling
    | None
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """RoPE (Su et al. 2021) over the first `dims` dimensions of a head.

    Dimension i is paired with i + dims/2; rows of checkpoints that pair adjacent dimensions are
    permuted on loading.
    """

    theta: float
    dims: int
    scaling: RopeScaling = None


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """Queries at position p times `1 + beta · ln(1 + ⌊(p + first) / original⌋)`.

    `first`: the number of the first position, 0 (Ministral 3) or 1 (Llama 4).
    """

    beta: float
    original: int
    first: int = 0

    def at(self, position: int) -> float:
        """The factor at `position`."""
        return 1 + self.beta * math.log1p((position + self.first) // self.original)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A query sees the keys of its own chunk alone; chunks begin at multiples of `size`."""

    size: int


Window = int | Chunk
P = TypeVar("P")  # a position, or a tensor of some


def first_key(position: P, window: Window) -> P:
    """The first key that a query sees; negative where a window reaches beyond the first one."""
    at: Any = position
    first: P = at - at % window.size if isinstance(window, Chunk) else at - window + 1
    return first


def seen_keys(position: P, window: Window | None) -> P:
    """How many keys a query sees, its own included."""
    at: Any = position
    first: Any = 0 if window is None else first_key(at, window)
    seen: P = at + 1 - first * (first > 0)
    return seen


def most_keys(window: Window | None) -> int | None:
    """The most keys that a query sees; None: all earlier ones."""
    return window.size if isinstance(window, Chunk) else window


def visible_pairs(tokens: int, past: int, window: Window | None) -> int:
    """Number of (query, key) pairs of `tokens` queries after `past` ones, without masked ones."""
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


@dataclass(frozen=True, kw_only=True)
class KeysValues:
    """Options of keys and values besides their projections.

    `norm` normalizes each head's value. `equal`: values are the keys before norm and rotation,
    without a separate projection. `layer`: keys and values, and their cache, are those of this
    layer.
    """

    norm: NormConfig | None = None
    equal: bool = False
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """What the softmax is taken of, from queries and keys.

    `scale` multiplies q·k. `window` W: a query at position p sees keys p-W+1 … p (itself
    included), or those of its `Chunk` up to p (Llama 4). With a `cap` c a scaled score s is
    `c · tanh(s / c)`, before the mask (Gemma 2). `growth` scales the rotated queries. With
    `slopes`, one per head, a score is lowered by the slope times the key's distance (ALiBi, Press
    et al. 2021). With `sinks` every head has an additional learned score in the softmax's
    denominator, so weights sum to less than 1 (gpt-oss).
    """

    scale: float
    window: Window | None = None
    cap: float | None = None
    growth: QueryGrowth | None = None
    slopes: tuple[float, ...] = ()
    sinks: bool = False


_SCORES = frozenset(field.name for field in fields(ScoreConfig))


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Softmax attention: H query heads over Hk key/value heads, head h reads kv head h // (H/Hk).

    With a `clip` c what the input projections give is limited to ±c (OLMo), of what is normalized
    the result of the norm (OLMoE). `qk_norm` normalizes each head's query and key before the
    rotation, a `JoinedNorm` all heads together. If `gated`, the heads' results are multiplied by
    the sigmoid of a gate projection (Qwen3-Next). Raises ValueError if slopes are not one per head
    or go with a window, if values are normalized but keys are not, or values equal keys and only
    keys are normalized.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scores: ScoreConfig
    rope: RopeConfig | None
    clip: float | None = None
    qk_norm: NormConfig | None = None
    gated: bool = False
    kv: KeysValues = KeysValues()
    qkv_bias: bool = False
    out_bias: bool = False

    AXES = "H heads, Hk kv_heads, dh head_dim, dv value_dim"  # letters of axes and their sizes

    def __post_init__(self) -> None:
        slopes = self.scores.slopes
        if slopes and (self.scores.window is not None or len(slopes) != self.heads):
            raise ValueError("slopes are one per head, without a window")
        unlike = (self.kv.norm is None) != (self.qk_norm is None)
        if unlike and (self.kv.norm is not None or self.kv.equal):
            raise ValueError("values are normalized only where keys are, equal ones always then")

    @property
    def projections(self) -> str:
        """The letters of `qkv` that have a projection matrix."""
        return "q" if self.kv.layer is not None else "qk" if self.kv.equal else "qkv"

    @property
    def entering(self) -> tuple[str, ...]:
        """The parts of the fused input product: the projections, and the gates if there are any."""
        return (*self.projections, "gate") if self.gated else tuple(self.projections)

    def changed(self, **changes: Any) -> AttentionConfig:
        """A copy with other values of these fields, among them those of its scores."""
        scores = {name: value for name, value in changes.items() if name in _SCORES}
        own = {name: value for name, value in changes.items() if name not in _SCORES}
        if scores:
            own["scores"] = replace(self.scores, **scores)
        return replace(self, **own)

    def divides(self, width: int) -> bool:
        """Whether the head size is `width / heads`."""
        return self.heads * self.head_dim == width
