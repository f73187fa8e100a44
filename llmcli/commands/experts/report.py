"""Which experts every token takes. Letters: P positions shown, E experts, K chosen ones.

Logarithms are natural.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from llmcli.records.document import Checked, ViewCheck
from llmcli.records.text import Token

if TYPE_CHECKING:
    from numpy import ndarray

Scores = Literal["softmax", "sigmoid", "logits"]
# arrays, and what they are in a document
Numbers = Annotated["ndarray", tuple[float, ...]]
NumberRows = Annotated["ndarray", tuple[tuple[float, ...], ...]]
IndexRows = Annotated["ndarray", tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class ExpertsLayer:
    """One layer's mixture: `per_token` of `experts` chosen by their `scores`, the largest.

    `corrected`: a bias is added to the scores that choose; of `groups` groups only the best
    `kept_groups` are chosen from, by the sum of the `group_best` largest scores of each.

    `load`: how many of the positions chose each expert; `mean_weights`: what it counted there,
    NaN for an expert that no token chose. `entropy` of the load in nats, `balance` as a share of
    ln E; `unused` are the experts that no token chose.

    `chosen` `[P, K]`, the largest score first, with their `weights` `[P, K]`. `margins` `[P]`: the
    smallest score of the chosen minus the largest of those refused, as they choose (corrected,
    within the groups that are left); NaN where none was refused. `smallest_margin` is at the
    position `smallest_at`. `shared_shares` `[P]`: ‖shared‖ / (‖shared‖ + ‖routed‖), the norms of
    what the shared expert adds and of the weighted sum of the chosen; None without a shared expert.
    """

    layer: int
    experts: int
    per_token: int
    scores: Scores
    corrected: bool
    groups: int
    kept_groups: int
    group_best: int
    load: tuple[int, ...]
    mean_weights: tuple[float, ...]
    entropy: float
    balance: float
    unused: tuple[int, ...]
    mean_margin: float
    smallest_margin: float
    smallest_at: int | None
    shared_share: float | None
    chosen: IndexRows
    weights: NumberRows
    margins: Numbers
    shared_shares: Numbers | None


@dataclass(frozen=True, kw_only=True)
class ExpertsReport(Checked):
    """The mixtures of the requested layers; `positions` index `tokens`.

    The first `prompt_tokens` of `tokens` are the prompt's, the others the model wrote. Loads,
    means and margins are of `positions` alone.
    """

    dtype: str
    tokens: tuple[Token, ...]
    prompt_tokens: int
    positions: tuple[int, ...]
    layers: tuple[ExpertsLayer, ...]
    checks: tuple[ViewCheck, ...]

    @property
    def from_prompt(self) -> int:
        """How many of `positions`, the first ones, are of the prompt."""
        return sum(position < self.prompt_tokens for position in self.positions)
