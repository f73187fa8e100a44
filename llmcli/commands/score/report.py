"""How well a model predicts a text, and two models on one text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredToken:
    """A token, its log-probability (natural) given all before it, and its rank (1: likeliest).

    The first one has neither: nothing predicts it. `bytes`: of its text, in hexadecimal; None
    without a tokenizer.
    """

    id: int
    text: str
    logprob: float | None
    rank: int | None
    bytes: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreTimings:
    """Seconds of scoring."""

    score_s: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model predicts a text. Logarithms are natural, bits are base 2.

    `mean_logprob`, `perplexity` = exp(-mean) and `bits_per_byte` are NaN if nothing could be
    scored. `window` and `stride`: the most tokens seen at once, and by how many it moves.
    """

    tokens: tuple[ScoredToken, ...]
    tokens_scored: int
    bytes_scored: int
    mean_logprob: float
    perplexity: float
    bits_per_byte: float
    window: int
    stride: int
    timings: ScoreTimings


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The second model's values minus the first's; per token only if the tokens are the same."""

    bits_per_byte: float
    mean_logprob: float | None
    largest_difference: float | None
    same_tokens: bool
