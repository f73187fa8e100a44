"""A head's attention matrix: a displayed part of it, its metrics, and the kinds of heads.

Plain data, without torch. `A[i, j]` is the weight of key j for the query at position i of T;
logarithms are natural.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

What = Literal["pattern", "scores"]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A part of one head's matrix: queries and keys `first` … `last`-1, NaN where masked.

    `values` is `[rows, columns]` float32. Each value is the maximum of `pool` × `pool` cells (1:
    not pooled); in a signed map the one with the largest magnitude.
    """

    layer: int
    head: int
    kv_head: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    pool: int
    values: np.ndarray
    signed: bool = False


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric per head: `formula` is its definition, with values in `low` … `high`.

    `high` is None if it grows with the prompt. `source`: its reference.
    """

    name: str
    words: str
    formula: str
    source: str = ""
    low: float = 0.0
    high: float | None = 1.0


@dataclass(frozen=True, kw_only=True)
class Label:
    """A kind of head: `metric` is at least `threshold`, as defined by `source`.

    `letter`: its mark in a map.
    """

    name: str
    letter: str
    metric: str
    threshold: float
    source: str


MOST_RANKED = 1024  # tokens: a rank needs the whole matrix and time ~ T³

METRICS: tuple[Metric, ...] = (
    Metric(
        name="entropy",
        words="how spread out its weights are, in nats",
        formula="mean of H_i = −Σ_j A[i,j] ln A[i,j]",
        source="Clark et al. 2019; Vig & Belinkov 2019",
        high=None,
    ),
    Metric(
        name="normalized_entropy",
        words="how spread out, as a share of the most that is possible",
        formula="mean over rows that see n_i > 1 keys of H_i / ln n_i",
        source="Clark et al. 2019; Vig & Belinkov 2019",
    ),
    Metric(
        name="effective_keys",
        words="over how many tokens it spreads",
        formula="mean of exp(H_i)",
        low=1.0,
        high=None,
    ),
    Metric(
        name="max_weight",
        words="the largest weight of a row",
        formula="mean of max_j A[i,j]",
        source="Voita et al. 2019",
    ),
    Metric(
        name="current_token",
        words="attention to the token itself",
        formula="mean of A[i,i]",
        source="Olsson et al. 2022, offset 0",
    ),
    Metric(
        name="previous_token",
        words="attention to the token before",
        formula="mean over rows that see key i−1 of A[i,i−1]",
        source="Olsson et al. 2022; Wang et al. 2022",
    ),
    Metric(
        name="sink",
        words="attention to the first token",
        formula="mean over rows i ≥ 1 that see key 0 of A[i,0]",
        source="Xiao et al. 2023",
    ),
    Metric(
        name="sink_rate",
        words="attention to the first token, its own row included",
        formula="α_0 = mean over rows that see key 0 of A[i,0]",
        source="Gu et al. 2025",
    ),
    Metric(
        name="learned_sink",
        words="what its learned sink takes, which no key gets",
        formula="mean of e^sink / (e^sink + Σ_j e^S[i,j])",
        source="gpt-oss model card 2025",
    ),
    Metric(
        name="negative",
        words="the share of weights below 0",
        formula="mean of Σ_{A[i,j] < 0} |A[i,j]| / Σ_j |A[i,j]|",
    ),
    Metric(
        name="half_life",
        words="after how many tokens half of what one wrote is forgotten",
        formula="median over j of the smallest n with Σ_{m=1…n} g[j+m] ≤ −ln 2, g the log-decays",
        high=None,
    ),
    Metric(
        name="overwritten",
        words="the share of writing that takes off what was stored",
        formula="Σ_i β_i ‖k_iᵀS_i‖ / Σ_i β_i (‖v_i‖ + ‖k_iᵀS_i‖), S_i the decayed state before i",
        source="after Yang et al. 2024, the delta rule",
    ),
    Metric(
        name="induction",
        words="attention to what followed the same token before",
        formula="mean over rows that see such a key of Σ_{j ≤ i, t_{j−1} = t_i} A[i,j]",
        source="Elhage et al. 2021; Olsson et al. 2022",
    ),
    Metric(
        name="duplicate",
        words="attention to the same token before",
        formula="mean over rows that see such a key of Σ_{j < i, t_j = t_i} A[i,j]",
        source="Wang et al. 2022",
    ),
    Metric(
        name="distance",
        words="how many tokens back it looks",
        formula="mean of Σ_j A[i,j] (i−j)",
        source="Vig & Belinkov 2019",
        high=None,
    ),
    Metric(
        name="distance_without_sink",
        words="how many tokens back it looks, the first token left out",
        formula="mean over i ≥ 1 of Σ_{j ≥ 1} A[i,j] (i−j) / Σ_{j ≥ 1} A[i,j]",
        high=None,
    ),
    Metric(
        name="locality_8",
        words="attention to the last 8 tokens",
        formula="mean over rows that see more than 8 keys of Σ_{j > i−8} A[i,j]",
    ),
    Metric(
        name="locality_64",
        words="attention to the last 64 tokens",
        formula="mean over rows that see more than 64 keys of Σ_{j > i−64} A[i,j]",
    ),
    Metric(
        name="effective_rank",
        words="how many directions the matrix has (a causal one is near full rank)",
        formula="exp(−Σ_k p_k ln p_k), p_k = σ_k / Σσ of A",
        source="Roy & Vetterli 2007",
        low=1.0,
        high=None,
    ),
)

RANK = "effective_rank"
LEARNED_SINK = "learned_sink"  # of models whose heads have one
HALF_LIFE, OVERWRITTEN = "half_life", "overwritten"
# of heads with a state, whose map is signed
LINEAR = ("negative", HALF_LIFE, OVERWRITTEN)
# all that one pass over the rows gives
USUAL: tuple[str, ...] = tuple(metric.name for metric in METRICS if metric.name != RANK)
COLOURED_BY = "normalized_entropy"  # the map of kinds: from one token to all of them

_ARENA = "a convention (ARENA's course): no theory sets it"
_OURS = "llmcli's own choice"

LABELS: tuple[Label, ...] = (
    Label(name="previous-token", letter="p", metric="previous_token", threshold=0.4, source=_ARENA),
    Label(name="induction", letter="i", metric="induction", threshold=0.4, source=_ARENA),
    Label(name="duplicate", letter="d", metric="duplicate", threshold=0.4, source=_ARENA),
    Label(
        name="sink",
        letter="s",
        metric="sink",
        threshold=0.3,
        source="ε of Gu et al. 2025 (arXiv 2410.10781), who have 64 tokens and count row 0",
    ),
    Label(name="local", letter="l", metric="locality_8", threshold=0.9, source=_OURS),
    Label(name="broad", letter="b", metric="normalized_entropy", threshold=0.8, source=_OURS),
)
EVEN = "broad"  # the kind of a head that attends evenly to all keys
COMMON = ("sink", "local", "broad")  # kinds that most heads of a model may be of
