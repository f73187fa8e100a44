"""What each layer would have said: the logit lens (nostalgebraist 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.records.document import Checked, ViewCheck
from llmcli.records.text import Token


@dataclass(frozen=True, kw_only=True)
class LensToken(Token):
    """A token and its probability."""

    probability: float


@dataclass(frozen=True, kw_only=True)
class LensCell:
    """One place of the residual stream, read at one position.

    `top`: its likeliest tokens, the first the likeliest. `entropy` and `kl`, the divergence
    KL(output ‖ this) from the model's own output, in nats. `target_rank` (1: likeliest) and
    `target_probability` are of that position's target.
    """

    top: tuple[LensToken, ...]
    entropy: float
    kl: float
    target_rank: int
    target_probability: float


@dataclass(frozen=True, kw_only=True)
class LensRow:
    """One place of the residual stream, `blocks.3.resid_post`, at every position shown."""

    name: str
    layer: int | None
    cells: tuple[LensCell, ...]


@dataclass(frozen=True, kw_only=True)
class LensReport(Checked):
    """Rows from the embedding to the last block; `positions` index `tokens`.

    The first `prompt_tokens` of `tokens` are the prompt's, the others the model wrote. `targets`:
    what `target_rank` is of, a token for each position with the probability that the model's
    output gives it; `target` says which in words. `settled`: for each position the name of the
    first place of the stream from which on the output's likeliest token stays likeliest to the
    end; it may be none of `rows`, for all layers count. `vocabulary`: how many tokens there are;
    no entropy is larger than its logarithm.
    """

    dtype: str
    vocabulary: int
    tokens: tuple[Token, ...]
    prompt_tokens: int
    positions: tuple[int, ...]
    target: str
    targets: tuple[LensToken, ...]
    rows: tuple[LensRow, ...]
    settled: tuple[str, ...]
    checks: tuple[ViewCheck, ...]

    @property
    def from_prompt(self) -> int:
        """How many of `positions`, the first ones, are of the prompt."""
        return sum(position < self.prompt_tokens for position in self.positions)


def short_name(name: str, *, embedding: str = "embed") -> str:
    """`embed`, `3 mid` for the stream before that layer's feed-forward part, `3` after it."""
    _, layer, place = name.split(".")
    if place == "resid_pre":
        return embedding
    return f"{layer} mid" if place == "resid_mid" else layer
