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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
    Metric("entropy", "how spread out its weights are, in nats",
           "mean of H_i = −Σ_j A[i,j] ln A[i,j]",
           "Clark et al. 2019; Vig & Belinkov 2019", high=None),
    Metric("normalized_entropy", "how spread out, as a share of the most that is possible",
           "mean over rows that see n_i > 1 keys of H_i / ln n_i",
           "Clark et al. 2019; Vig & Belinkov 2019"),
    Metric("effective_keys", "over how many tokens it spreads",
           "mean of exp(H_i)", low=1.0, high=None),
    Metric("max_weight", "the largest weight of a row",
           "mean of max_j A[i,j]", "Voita et al. 2019"),
    Metric("current_token", "attention to the token itself",
           "mean of A[i,i]", "Olsson et al. 2022, offset 0"),
    Metric("previous_token", "attention to the token before",
           "mean over rows that see key i−1 of A[i,i−1]", "Olsson et al. 2022; Wang et al. 2022"),
    Metric("sink", "attention to the first token",
           "mean over rows i ≥ 1 that see key 0 of A[i,0]", "Xiao et al. 2023"),
    Metric("sink_rate", "attention to the first token, its own row included",
           "α_0 = mean over rows that see key 0 of A[i,0]", "Gu et al. 2025"),
    Metric("learned_sink", "what its learned sink takes, which no key gets",
           "mean of e^sink / (e^sink + Σ_j e^S[i,j])", "gpt-oss model card 2025"),
    Metric("negative", "the share of weights below 0",
           "mean of Σ_{A[i,j] < 0} |A[i,j]| / Σ_j |A[i,j]|"),
    Metric("half_life", "after how many tokens half of what one wrote is forgotten",
           "median over j of the smallest n with Σ_{m=1…n} g[j+m] ≤ −ln 2, g the log-decays",
           high=None),
    Metric("overwritten", "the share of writing that takes off what was stored",
           "Σ_i β_i ‖k_iᵀS_i‖ / Σ_i β_i (‖v_i‖ + ‖k_iᵀS_i‖), S_i the decayed state before i",
           "after Yang et al. 2024, the delta rule"),
    Metric("induction", "attention to what followed the same token before",
           "mean over rows that see such a key of Σ_{j ≤ i, t_{j−1} = t_i} A[i,j]",
           "Elhage et al. 2021; Olsson et al. 2022"),
    Metric("duplicate", "attention to the same token before",
           "mean over rows that see such a key of Σ_{j < i, t_j = t_i} A[i,j]", "Wang et al. 2022"),
    Metric("distance", "how many tokens back it looks",
           "mean of Σ_j A[i,j] (i−j)", "Vig & Belinkov 2019", high=None),
    Metric("distance_without_sink", "how many tokens back it looks, the first token left out",
           "mean over i ≥ 1 of Σ_{j ≥ 1} A[i,j] (i−j) / Σ_{j ≥ 1} A[i,j]", high=None),
    Metric("locality_8", "attention to the last 8 tokens",
           "mean over rows that see more than 8 keys of Σ_{j > i−8} A[i,j]"),
    Metric("locality_64", "attention to the last 64 tokens",
           "mean over rows that see more than 64 keys of Σ_{j > i−64} A[i,j]"),
    Metric("effective_rank", "how many directions the matrix has (a causal one is near full rank)",
           "exp(−Σ_k p_k ln p_k), p_k = σ_k / Σσ of A", "Roy & Vetterli 2007", low=1.0, high=None),
)  # fmt: skip

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
    Label("previous-token", "p", "previous_token", 0.4, _ARENA),
    Label("induction", "i", "induction", 0.4, _ARENA),
    Label("duplicate", "d", "duplicate", 0.4, _ARENA),
    Label("sink", "s", "sink", 0.3,
          "ε of Gu et al. 2025 (arXiv 2410.10781), who have 64 tokens and count row 0"),
    Label("local", "l", "locality_8", 0.9, _OURS),
    Label("broad", "b", "normalized_entropy", 0.8, _OURS),
)  # fmt: skip
EVEN = "broad"  # the kind of a head that attends evenly to all keys
COMMON = ("sink", "local", "broad")  # kinds that most heads of a model may be of
