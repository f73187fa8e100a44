"""How well a model predicts a text."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.records.text import TextScore


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
class Score(TextScore):
    """How well a model predicts a text. Logarithms are natural, bits are base 2.

    `window` and `stride`: the most tokens seen at once, and by how many it moves.
    """

    tokens: tuple[ScoredToken, ...]
    window: int
    stride: int
    timings: ScoreTimings
