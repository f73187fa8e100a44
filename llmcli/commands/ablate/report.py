"""What a number of a text becomes where one part of the model after another is ablated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcli.records.contribution import Contribution
from llmcli.records.document import Checked, ViewCheck
from llmcli.records.text import Token

By = Literal["mean", "zero", "resample"]
Metric = Literal["loss", "logit", "difference"]


@dataclass(frozen=True, kw_only=True)
class Effect(Contribution):
    """What ablating `name` adds to the number, in the mean of the prompts.

    `kind`: head, expert, layer (all that it adds to the stream), or the activation's name in its
    layer. `low` … `high` hold the true mean with 95 % confidence; null for a single prompt.
    """

    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class AblateReport(Checked):
    """The effect of each part, ablated `by` zero, its mean over all tokens of the prompts, or what
    it is in another prompt.

    `value`: the number without an ablation, in the mean of the `prompts`. `metric`: `loss`, the
    mean −log p of the text's own next tokens in nats; `logit`, of `answer` after the last token;
    `difference`, less that of `versus`. `answer` is null where it is another token for each prompt.
    `tokens`: of the only prompt, or null. `layers`: how many there are.
    """

    dtype: str
    by: By
    metric: Metric
    answer: Token | None
    versus: Token | None
    prompts: int
    tokens: tuple[Token, ...] | None
    value: float
    layers: int
    effects: tuple[Effect, ...]
    checks: tuple[ViewCheck, ...]
