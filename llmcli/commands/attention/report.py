"""What the heads of a model attend to. Letters: H heads, T queries, S keys.

One head's matrix is `A[i, j]`, the weight of key j for the query at position i, from 0;
logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from llmcli.commands.attention.options import Span
from llmcli.records.attention import Label, Matrix, Metric, What
from llmcli.records.document import APART, Checked, ViewCheck
from llmcli.records.text import Token

Key = TypeVar("Key")
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key, in order."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


@dataclass(frozen=True, kw_only=True)
class HeadReport:
    """One head. A metric for which no row qualifies is NaN; `labels` are the kinds that it is."""

    head: int
    kv_head: int
    metrics: dict[str, float]
    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One layer. `kind`: `full`, `window 512`, or its mixer; `kv_heads` heads of keys and values.

    `sinks`: its heads have learned sinks, which take a part of every row. `signed`: its map is that
    of a recurrence, whose weights have signs: metrics are of |A[i,j]| / Σ_j |A[i,j]|. `note`: what
    such a map is, in a sentence.
    """

    layer: int
    kind: str
    kv_heads: int
    heads: tuple[HeadReport, ...]
    sinks: bool = False
    signed: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A query that attends to a key. `rank_value` is what pairs are ranked by.

    By the weight, or where weights have signs by its share |A[i,j]| / Σ_j |A[i,j]| of the row.
    """

    layer: int
    head: int
    kv_head: int
    query: int
    key: int
    weight: float
    rank_value: float


@dataclass(frozen=True, kw_only=True)
class AttentionReport(Checked):
    """The requested heads, in order.

    The first `prompt_tokens` of `tokens` were given, the others generated.
    `metrics` and `labels` define the names in `layers`. `rows`: how many rows each metric is the
    mean of (most, of all heads). `pairs`, the largest first, are of all those layers and heads
    together. `skipped`: metrics that were left out, with the reason. `unlabelled`: kinds that these
    tokens leave undetermined, with the reason; some only in layers of one kind, which the reason
    names.
    """

    what: What
    dtype: str
    tokens: tuple[Token, ...]
    prompt_tokens: int
    metrics: tuple[Metric, ...]
    rows: dict[str, int]
    labels: tuple[Label, ...]
    layers: tuple[LayerReport, ...]
    matrices: tuple[Matrix, ...] = field(metadata=APART)
    part: tuple[Span, Span] = field(metadata=APART)  # queries and keys that were requested
    pairs: tuple[Pair, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    unlabelled: dict[str, str] = field(default_factory=dict)
    checks: tuple[ViewCheck, ...]

    @property
    def heads(self) -> dict[str, HeadReport]:
        """Every head by its name, `3.2` in layer 3."""
        return {f"{layer.layer}.{head.head}": head for layer in self.layers for head in layer.heads}

    @property
    def shares_keys(self) -> bool:
        """Whether heads share keys and values."""
        return any(head.kv_head != head.head for head in self.heads.values())

    @property
    def sinks(self) -> bool:
        """Whether heads have learned sinks: entropies and distances are of A[i,j] / Σ_j A[i,j]."""
        return any(layer.sinks for layer in self.layers)

    @property
    def signed(self) -> bool:
        """Whether there are maps with negative weights."""
        return any(layer.signed for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class HeadStates:
    """One head after the tokens at each of the report's positions.

    `norms`: √(Σ S²). `effective_ranks`: exp(−Σ_k p_k ln p_k), p_k = σ_k / Σσ of S, 0 where S is 0
    (Roy & Vetterli 2007).
    """

    head: int
    norms: tuple[float, ...]
    effective_ranks: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LayerStates:
    """One layer, whose `kind` is what its mixer is called.

    The state of each head has `rows` (numbers of a key) and `columns` (of a value); `bytes` is what
    a cache takes for all heads of one sequence, however long it is.
    """

    layer: int
    kind: str
    rows: int
    columns: int
    bytes: int
    heads: tuple[HeadStates, ...]


@dataclass(frozen=True, kw_only=True)
class StatesReport(Checked):
    """States after the tokens at some `positions`, evenly spread, the last token among them.

    The first `prompt_tokens` of `tokens` were given, the others generated.
    """

    what: Literal["state"] = "state"
    dtype: str
    tokens: tuple[Token, ...]
    prompt_tokens: int
    positions: tuple[int, ...]
    layers: tuple[LayerStates, ...]
    checks: tuple[ViewCheck, ...]
