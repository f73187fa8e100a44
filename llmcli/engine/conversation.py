"""A conversation: messages, the chat template around them, and a session that has read them.

Per turn, only tokens after the longest common prefix with the read ones are computed. Answers keep
the model's ids, since encoding their text could give other ids. Both require that the template
renders the past unchanged; otherwise (past reasoning is omitted, the system message changes) the
rest is encoded and computed again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmcli.engine.messages import AnswerIds
from llmcli.engine.output import Output, Token
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.seeds import sample_seed
from llmcli.engine.session import Session, make_room
from llmcli.engine.speculation import Speculation, decode
from llmcli.errors import CheckpointError, PromptTooLong, UsageError
from llmcli.records.text import LEAD, Finish, Message
from llmcli.text.chat import ChatTemplate
from llmcli.text.segments import Markers, Segmenter, whole_answer
from llmcli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmcli.model import Model

_FIRST = 256  # initial capacity in tokens; it doubles
_FULL = "start over with `/clear`"


@dataclass(frozen=True, kw_only=True)
class TurnTokens:
    """Tokens of the last answer's prompt: total, and newly computed."""

    prompt: int
    computed: int


class Conversation:
    """Messages that a model answers, in at most `room` tokens.

    `variables`: additional template variables (`enable_thinking` …). Raises UsageError if the model
    has no tokenizer or no chat template.
    """

    def __init__(
        self, model: Model, *, room: int, variables: Mapping[str, Any] | None = None
    ) -> None:
        tokenizer = model.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise UsageError(
                f"`{model.name}` has no chat template, so it cannot chat",
                hint="`llmcli generate` continues a text",
            )
        self.model = model
        self.room = room
        self.variables = dict(variables or {})
        self.messages: list[Message] = []
        self.answers = 0  # begun answers; each has its own seed
        self.tokens = TurnTokens(prompt=0, computed=0)
        self.speculation: Speculation | None = None
        self.tokenizer: Tokenizer = tokenizer
        self.template: ChatTemplate = tokenizer.chat_template
        self._markers = Markers.of_tokenizer(tokenizer)
        self._answers = AnswerIds(tokenizer, model.eos_ids)
        self._prompt = ""
        self._session = Session(model.decoder, 1, min(_FIRST, room))

    @property
    def used(self) -> int:
        """Tokens that the session has read."""
        return self._session.lengths[0]

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[0] if self.messages else None
        return first.content if first is not None and first.role == "system" else None

    def template_variables(self) -> frozenset[str]:
        """The names of variables that the chat template looks up. Raises CheckpointError."""
        return self.template.variables()

    def set_system(self, text: str | None) -> None:
        """Set or replace the system message; None removes it."""
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = [*([Message(role="system", content=text)] if text else []), *rest]

    def say(self, text: str) -> None:
        """Add a user message."""
        self.messages.append(Message(role="user", content=text))

    def undo(self) -> str | None:
        """Remove the last user message and all after it; returns its text or None."""
        users = [at for at, one in enumerate(self.messages) if one.role == "user"]
        if not users:
            return None
        text = self.messages[users[-1]].content
        self.messages = self.messages[: users[-1]]
        return text

    def clear(self) -> None:
        """Remove all messages but the system message."""
        self.messages = self.messages[:1] if self.system is not None else []

    def reread(self) -> None:
        """Compute every token again: the model is another one."""
        self._session.rewind(0)

    def ids(self) -> list[int]:
        """The tokens of the messages. Raises CheckpointError if the template fails."""
        return self._encoded(self.messages, prompt=False) if self.messages else []

    @property
    def last_answer(self) -> int:
        """Number of the last answer's tokens at the end of `ids`; 0 if the last message is none.

        Includes the template's text after it. Raises CheckpointError if the template fails.
        """
        if len(self.messages) < 2 or self.messages[-1].role != "assistant":
            return 0
        return max(0, len(self.ids()) - len(self._encoded(self.messages[:-1])))

    def missing(self, least: int) -> int:
        """Number of tokens missing in the context for an answer of `least` tokens; 0 if it fits.

        Raises CheckpointError if the template fails.
        """
        return self._missing(self.messages, least)

    def drop_turns(self, least: int) -> int:
        """Drop the fewest oldest turns that leave room for an answer of `least` tokens.

        A turn is a user message and all messages up to the next one. The system message and the
        last turn are kept. Returns the number of dropped turns: all others if still too long.
        Raises CheckpointError if the template fails.
        """
        front = self.messages[:1] if self.system is not None else []
        users = [at for at, one in enumerate(self.messages) if one.role == "user"]

        def fits(turn: int) -> bool:
            return not self._missing([*front, *self.messages[users[turn] :]], least)

        dropped = bisect_left(range(len(users) - 1), True, key=fits)
        if dropped:
            self.messages = [*front, *self.messages[users[dropped] :]]
        return dropped

    def _missing(self, messages: Sequence[Message], least: int) -> int:
        # the last new token is never read again
        return max(0, len(self._encoded(messages)) - 1 + least - self.room)

    def load(self, messages: Sequence[Message], answers: int, variables: Mapping[str, Any]) -> int:
        """Continue a saved conversation; its tokens are read with the next answer.

        Returns the number of answers that lost their ids, since these do not match the text. Raises
        CheckpointError if the template fails; then nothing has changed.
        """
        loaded = [self._answers.checked(one) for one in messages]
        asked = loaded[:-1] if loaded and loaded[-1].role == "assistant" else loaded
        if asked:
            self._rendered(asked, variables)
        self.messages, self.answers, self.variables = loaded, answers, dict(variables)
        return sum(old.ids != new.ids for old, new in zip(messages, loaded, strict=True))

    def answer(
        self,
        sampling: Sampling,
        *,
        limit: int | None,
        stop: Sequence[str] = (),
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generator[Token, None, None]:
        """Yield the tokens of the answer to the messages, at most `limit` (None: no limit).

        The n-th answer uses the n-th seed derived from `sampling.seed`. On an early stop (a closed
        iterator or an exception) the partial answer is kept. Raises PromptTooLong if there is no
        room left, CheckpointError if the template fails, OutOfMemory, NotFinite.
        """
        text = self._prompt = self._rendered(self.messages)
        ids = self._answers.encoded(self.messages, text)
        if not ids:
            raise CheckpointError("the chat template gives no text for the conversation")
        self.model.check_tokenized(ids)
        room = self.room - len(ids) + 1
        if room < 1:
            raise PromptTooLong(
                f"the conversation has {len(ids)} tokens, {len(ids) - self.room} more than the "
                f"context of {self.room}",
                hint="remove a turn with `/undo`, or start over with `/clear`",
            )
        session = self._session
        read = session.reuse(ids)
        self.tokens = TurnTokens(prompt=len(ids), computed=len(ids) - read)
        make_room(session, min(len(ids) + 1, self.room), self.room, _FULL)
        if read < len(ids):
            session.prefill([ids[read:]], on_prefill=on_prefill)
        session.keep()  # a second answer begins here
        seed = sample_seed(sampling.seed, self.answers)
        self.answers += 1
        vocab, device, eos_ids = self.model.config.vocab, self.model.device, self.model.eos_ids
        sampling = replace(sampling, seed=seed)
        sampler = Sampler(sampling, [ids], vocab=vocab, device=device, limit=limit)
        room = room if limit is None else min(limit, room)
        output = Output(0, ids, room=room, tokenizer=self.tokenizer, stop=stop, eos_ids=eos_ids)
        written: list[int] = []
        pieces: list[str] = []
        end: Finish = "interrupted"
        try:
            for choices in decode(session, sampler, limit, self.speculation):
                token = output.add(choices[0])
                written.append(token.id)
                pieces.append(token.text)
                end = token.finish or end
                yield token
                if token.finish is not None:
                    return
                wanted = min(session.lengths[0] + 1, self.room)  # drafted tokens may have been read
                make_room(session, wanted, self.room, _FULL)
        finally:
            if written:
                self.messages.append(self._written(written, "".join(pieces), text, end))

    def segmenter(self) -> Segmenter:
        """A segmenter for the current answer."""
        return Segmenter(self._markers, self._prompt)

    def _written(self, ids: list[int], text: str, before: str, end: Finish) -> Message:
        own = self._answers.own(ids, text, end)
        lead = before[-LEAD:] if own else ""
        parts = whole_answer(self._markers, text, before)
        return Message(
            role="assistant",
            content=parts.content,
            reasoning=parts.reasoning,
            raw=None if parts.content == text else text,
            ids=own,
            lead=lead,
            finish_reason=end,
        )

    def _rendered(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        apart = self._markers.apart  # otherwise the template extracts past reasoning
        given = [
            {"role": one.role, "content": one.content if apart else one.written} for one in messages
        ]
        return self.template.render(
            given, variables=self.variables if variables is None else variables,
            add_generation_prompt=prompt,
        )

    def _encoded(self, messages: Sequence[Message], *, prompt: bool = True) -> list[int]:
        return self._answers.encoded(messages, self._rendered(messages, prompt=prompt))
