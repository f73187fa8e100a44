"""What a number of the model is made of, and what of it differs between two prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import StatisticsError, correlation
from typing import Literal

from llmcli.records.contribution import Contribution
from llmcli.records.document import Checked, ViewCheck
from llmcli.records.document import derived as member
from llmcli.records.text import Token


@dataclass(frozen=True, kw_only=True)
class AttributeReport(Checked):
    """The `terms` of a number, of the last of `tokens`.

    `number`: the activation that it is of, and `index` in that; of logits, `answer` is the token,
    and `versus` the one whose logit is taken off. `value`: what the model computed. `method`:
    `direct`, the terms add up to `value`; `gradient`, of every activation at every position how
    much the number would change if it were that of `tokens` in the prompt `corrupted`, whose own
    number is `corrupted_value`, by the gradient there; the strongest of each kind are
    patched, too.
    """

    dtype: str
    method: Literal["direct", "gradient"]
    tokens: tuple[Token, ...]
    number: str
    index: tuple[int, ...] | None
    answer: Token | None
    versus: Token | None
    value: float
    corrupted: tuple[Token, ...] | None = None
    corrupted_value: float | None = None
    terms: tuple[Contribution, ...]
    checks: tuple[ViewCheck, ...]

    @member
    def sum(self) -> float | None:
        """The sum of all terms; None of gradients, for one activation has others in it."""
        return math.fsum(t.value for t in self.terms) if self.method == "direct" else None

    @member
    def correlation(self) -> float | None:
        """Pearson's, of `value` and `patched` of the terms that have both; None without any."""
        both = [(t.value, t.patched) for t in self.terms if t.patched is not None]
        try:
            return correlation([value for value, _ in both], [patched for _, patched in both])
        except StatisticsError:  # fewer than two, or all are the same
            return None
