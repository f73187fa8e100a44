"""The tokens of a text, generated texts, and the messages of a conversation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from llmcli.records.document import OPTIONAL

Finish = Literal["stop", "length", "eos", "interrupted"]
LEAD = 32  # characters before an answer, used to find it again


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token: its id and its text for people, which is empty without a tokenizer."""

    id: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPiece:
    """One token of a text: bytes `start` to `end` of its UTF-8 form.

    Leading `special` tokens that the text does not contain (BOS) have `start == end == 0`.

    `text` is for display, with escaped incomplete characters. `bytes` are the token's bytes in
    hexadecimal.
    """

    id: int
    text: str
    bytes: str
    start: int
    end: int
    special: bool


@dataclass(frozen=True, kw_only=True)
class Alternative(Token):
    """A token that the model could have chosen, with its log-probability."""

    logprob: float


@dataclass(frozen=True, kw_only=True)
class TokenLogprob(Token):
    """A generated token's log-probability under the raw model, and the most likely tokens.

    None unless the choice is greedy: `margin`, nats to the best other token after penalties, and
    `tied`, whether rounding may have decided (`engine.ties`).
    """

    logprob: float | None
    top: tuple[Alternative, ...]
    margin: float | None
    tied: bool | None


def covered_bytes(spans: Iterable[tuple[int, int]]) -> int:
    """Number of bytes of a text covered by the `spans` (start, end) of its tokens.

    Spans of tokens that share a character overlap, so their total length may exceed the text.
    """
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """How well a model predicts the scored tokens of a text.

    `mean_logprob`, `perplexity` = exp(-mean) and `bits_per_byte` are NaN if nothing could be
    scored.
    """

    tokens_scored: int
    bytes_scored: int
    mean_logprob: float
    perplexity: float
    bits_per_byte: float

    @classmethod
    def of(
        cls, logprobs: Sequence[float | None], spans: Sequence[tuple[int, int]]
    ) -> TextScore:
        """Of tokens with these log-probabilities (None: not scored) and bytes (start, end)."""
        known = [logprob for logprob in logprobs if logprob is not None]
        pairs = zip(logprobs, spans, strict=True)
        size = covered_bytes(span for logprob, span in pairs if logprob is not None)
        total = math.fsum(known)
        mean = total / len(known) if known else math.nan
        perplexity = math.inf
        with suppress(OverflowError):
            perplexity = math.exp(-mean)
        return cls(
            tokens_scored=len(known),
            bytes_scored=size,
            mean_logprob=mean,
            perplexity=perplexity,
            bits_per_byte=-total / math.log(2) / size if size else math.nan,
        )


@dataclass(kw_only=True)
class Generated:
    """One continuation. `finish_reason` stays `interrupted` until the last token arrives.

    `content` and `reasoning`: parts of the text if the template marks reasoning. `tied_tokens`:
    number of near ties; None unless the choice is greedy.
    """

    text: str = ""
    content: str | None = field(default=None, metadata=OPTIONAL)
    reasoning: str | None = field(default=None, metadata=OPTIONAL)
    ids: list[int] = field(default_factory=list)
    finish_reason: Finish = "interrupted"
    tied_tokens: int | None = field(default=None, metadata=OPTIONAL)
    logprobs: list[TokenLogprob] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message.

    `ids` of an answer are the model's, including its end token. `lead`: the last `LEAD` characters
    of the template's text before the answer; `finish_reason`: how it ended. Empty and None for
    messages not written by the model; no ids if they do not match the text (cut by a stop string,
    incomplete character).

    `reasoning`: of an answer, besides its `content`; `raw`: the model's whole text with the markers
    of these parts; None if equal to the content.
    """

    role: Literal["system", "user", "assistant"]
    content: str
    reasoning: str = field(default="", metadata=OPTIONAL)
    raw: str | None = field(default=None, metadata=OPTIONAL)
    ids: tuple[int, ...] = field(default=(), metadata=OPTIONAL)
    lead: str = field(default="", metadata=OPTIONAL)
    finish_reason: Finish | None = field(default=None, metadata=OPTIONAL)

    @property
    def written(self) -> str:
        """The text of its ids."""
        return self.content if self.raw is None else self.raw

    def template_input(self) -> dict[str, str]:
        """The message as a chat template takes it, an answer without the markers in it."""
        own = {"role": self.role, "content": self.content}
        return own | {"reasoning": self.reasoning} if self.reasoning else own


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """Peak bytes during `load`, `prefill` or `decode`; `base`: before `load`.

    `resident_bytes`: of the whole process, None if unknown. `device_bytes`: tensors on a GPU, None
    on a CPU.
    """

    phase: str
    resident_bytes: int | None
    device_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds, tokens per second and bytes of one run of `generate`, or of one prompt of a batch.

    `first_token_s` is from the first prompt token to the first new one; the prompt's rate is over
    the same time. The generation rate excludes the first token. Prompts of a batch run in parallel:
    tokens are per prompt, seconds per group. `peak_memory_bytes`: of the whole run (on a GPU: its
    memory); `peaks`: by phase.
    """

    import_s: float
    load_s: float
    first_token_s: float | None
    prompt_tokens: int
    prompt_tokens_per_s: float | None
    generated_tokens: int
    generated_tokens_per_s: float | None
    peak_memory_bytes: int | None
    peaks: tuple[PhasePeak, ...] = ()
