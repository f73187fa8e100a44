"""What the heads of a model attend to. Letters: H heads, T queries, S keys.

One head's matrix is `A[i, j]`, the weight of key j for the query at position i, from 0;
logarithms are natural.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmcli.records.checks import ViewCheck
from llmcli.records.document import APART
from llmcli.records.head_metrics import Label, Metric
from llmcli.records.matrix import Matrix, What
from llmcli.records.text import Token


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
class AttentionReport:
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
    pairs: tuple[Pair, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    unlabelled: dict[str, str] = field(default_factory=dict)
    checks: tuple[ViewCheck, ...]

    @property
    def sinks(self) -> bool:
        """Whether heads have learned sinks: entropies and distances are of A[i,j] / Σ_j A[i,j]."""
        return any(layer.sinks for layer in self.layers)

    @property
    def signed(self) -> bool:
        """Whether there are maps with negative weights."""
        return any(layer.signed for layer in self.layers)

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)
