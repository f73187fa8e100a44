"""A growing sequence: its tokens, its text, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llmcli.engine.stop import StopMatcher
from llmcli.text.stream import StreamDecoder
from llmcli.text.tokenizer import Tokenizer

Finish = Literal["stop", "length", "eos"]


class Choice(NamedTuple):
    """The choice for one sequence: an id, and requested log-probabilities."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    margin: float | None = None
    tied: bool | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    `sequence` is prompt · samples + sample. `index` counts the sequence's tokens from 0. `text` is
    the text that became certain with this token: it may lag (incomplete character, possible stop
    string) and is "" for special tokens; concatenated it is the sequence's text. `logprob` (nats)
    is the model's, before penalties and filters; `top`: the best (id, logprob), best first.
    `finish` is set on the last token: an end token (`eos`, counted but without text), a stop
    string, or no more room (`length`).

    For greedy choices, if requested: `margin` (nats) to the best other token, after penalties;
    `tied`: rounding errors may be as large (`engine.ties`).
    """

    sequence: int
    index: int
    id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    finish: Finish | None
    margin: float | None = None
    tied: bool | None = None


class Output:
    """Turns the choices of one sequence into tokens, up to `room`.

    `eos_ids` end it (empty: never). Without a `tokenizer` there is no text. The text continues
    `prompt`, unless that ends with a special token: then a new text begins. It lacks
    `Tokenizer.hidden_ids`, but `stop` strings also match in these.
    """

    def __init__(
        self,
        sequence: int,
        prompt: Sequence[int],
        *,
        room: int,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        eos_ids: frozenset[int],
    ) -> None:
        self.sequence = sequence
        self.finish: Finish | None = None
        self._room = room
        self._eos_ids = eos_ids
        self._index = 0
        self._decoder = None
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = frozenset()  # tokens whose text only `stop` matches
        if tokenizer is not None:
            if stop:
                self._hidden = tokenizer.hidden_ids | eos_ids
            begins = prompt[-1] in tokenizer.special_ids
            self._decoder = StreamDecoder(tokenizer, markers=True, first=begins)
        self._stop = StopMatcher(stop)

    def add(self, choice: Choice) -> Token:
        """Add the next choice and return its token; it is the last one if `finish` is set."""
        text = ""
        if choice.id in self._eos_ids:
            self.finish = "eos"
        else:
            if self._decoder is not None:
                text = self._stop.push(self._decoder.push(choice.id)) + self._unseen(choice.id)
            if self._stop.stopped:
                self.finish = "stop"
            elif self._index + 1 == self._room:
                self.finish = "length"
        if self.finish in ("eos", "length"):
            text += self._rest(choice.id)
        token = Token(self.sequence, self._index, text=text, finish=self.finish, **choice._asdict())
        self._index += 1
        return token

    def _unseen(self, id: int) -> str:
        """The text that becomes certain by a hidden token."""
        if self._tokenizer is None or id not in self._hidden:
            return ""
        return self._stop.push(self._tokenizer.token_text(id), hidden=True)

    def _rest(self, last: int) -> str:
        """The text held back; it, or the end token, may still complete a stop string."""
        if self._decoder is None:
            return ""
        text = self._stop.push(self._decoder.finish())
        if self.finish == "eos":
            text += self._unseen(last)
        if self._stop.stopped:
            self.finish = "stop"
        return text + self._stop.finish()
