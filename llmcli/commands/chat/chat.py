"""A conversation on the terminal: answers as they come, what they took, and the file they go to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llmcli.commands.chat.screen import AnswerScreen, ReasoningMode
from llmcli.errors import LlmcliError, PromptTooLong, UsageError, WriteFailed
from llmcli.records.document import members
from llmcli.records.numbers import counted
from llmcli.records.ranges import SAMPLING
from llmcli.shell.conversations import (
    ChatSettings,
    ModelName,
    Transcript,
    read_transcript,
    real_path,
    state_of,
)
from llmcli.shell.encoding import check_name
from llmcli.shell.exits import SIGNALS, Terminated
from llmcli.shell.output import Output, write_document
from llmcli.shell.progress import Progress
from llmcli.shell.running import edit_requests, header
from llmcli.ui.theme import FAINT

if TYPE_CHECKING:
    from llmcli.engine.conversation import Conversation
    from llmcli.records.text import Message


ANSWER = 64  # tokens of room for an answer: with less, the user chooses what to drop
NAMES = (*SAMPLING, "max_tokens", "seed")  # the settings that `/set` changes


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Tokens and seconds of the last answer. `computed`: prompt tokens not read before."""

    prompt: int
    computed: int
    generated: int
    prompt_s: float
    decode_s: float


@dataclass(kw_only=True)
class Chat:
    """A conversation with its settings; `file` is written anew after every answer and change.

    `suppressed`: tokens that the model's files forbid. `chosen` (settings) and `variables` (of the
    template) were set by the user and override those of a transcript. `typed`: the typed line of
    each message with files in it. `choose` asks the user for a letter when the context is full.
    `seen`: the state of each file when it was last read or written, by its real path; another chat
    may write it, too.
    """

    conversation: Conversation
    settings: ChatSettings
    out: Output
    suppressed: Mapping[str, tuple[int, ...]]
    file: str | None
    stats: bool
    reasoning: ReasoningMode | None
    plain: bool
    chosen: set[str]
    variables: dict[str, Any]
    turn: Turn | None = None
    choose: Callable[[str], str] | None = None
    typed: dict[str, str] = field(default_factory=dict)
    seen: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    _kept: Transcript | None = None  # what the file has

    def say(self, text: str, *, instead: bool = False) -> bool:
        """Sends a message (`instead`: replacing the last one) and writes the answer.

        Without an answer the message is dropped. Returns False where Ctrl-C ended the answer.
        """
        conversation = self.conversation
        with self._kept_without_answer():
            if instead:
                conversation.undo()
            conversation.say(text)
            try:
                return self._has_room() and self.answer()
            except PromptTooLong:
                self._check_alone()
                raise

    def _check_alone(self) -> None:
        """Raises PromptTooLong if the last message does not fit even without the earlier ones."""
        conversation = self.conversation
        messages, asked = conversation.messages, conversation.messages[-1]
        conversation.clear()
        conversation.messages = [*conversation.messages, asked]
        over = conversation.missing(1)
        conversation.messages = messages
        if over:
            raise PromptTooLong(
                f"the message and the template around it take {conversation.room + over:,} tokens, "
                f"{over:,} more than the context of {conversation.room:,}",
                hint="shorten the message",
            )

    def _has_room(self) -> bool:
        """Whether to begin an answer. Asks the user what to drop if the context is nearly full."""
        conversation = self.conversation
        least = min(ANSWER, self.settings.limit or ANSWER, conversation.room // 4)
        if self.choose is None or len(conversation.messages) < 2 or not conversation.missing(least):
            return True
        self._check_alone()
        room = conversation.room
        self.out.aside(f"the context of {room:,} tokens has no room for another answer")
        chosen = self.choose("[d]rop the oldest turns, [c]lear, or Enter to cancel? ")
        if not chosen or chosen not in "dc":
            self.out.note("cancelled: the message was not sent")
            return False
        before, asked = len(conversation.ids()), conversation.messages[-1]
        if chosen == "c":
            conversation.clear()
            conversation.messages = [*conversation.messages, asked]
            what = "all earlier messages"
        else:
            what = counted(conversation.drop_turns(least), "oldest turn")
        if not conversation.missing(1):
            self.out.note(f"dropped {what}, {counted(before - len(conversation.ids()), 'token')}")
        return True

    def meter(self) -> str:
        """How full the context is, for the prompt: `1,204 / 8,192`."""
        return f"{self._used():,} / {self.conversation.room:,}"

    def _used(self) -> int:
        """Tokens of the context that the conversation takes."""
        conversation = self.conversation
        try:
            tokens = len(conversation.ids())
        except LlmcliError:  # the template fails, which the next answer will say
            tokens = conversation.used
        return min(tokens, conversation.room)

    def regenerate(self) -> bool:
        """Generates another answer to the last message; keeps the old one if that fails."""
        conversation = self.conversation
        with self._kept_without_answer():
            if conversation.messages and conversation.messages[-1].role == "assistant":
                conversation.messages = conversation.messages[:-1]
            if not conversation.messages or conversation.messages[-1].role != "user":
                raise UsageError("there is nothing to answer")
            return self.answer()

    @contextmanager
    def _kept_without_answer(self) -> Iterator[None]:
        """Restores the messages if no answer came: it was refused, or stopped too early."""
        conversation = self.conversation
        before, answers = list(conversation.messages), conversation.answers
        try:
            yield
        finally:
            if conversation.answers == answers or conversation.messages[-1].role == "user":
                conversation.messages = before

    def answer(self) -> bool:
        """Writes the model's answer as it comes; returns False where Ctrl-C ended it.

        An answer cut short by Ctrl-C or an error is kept, shown and saved like a complete one.
        Raises the errors of `Conversation.answer`.
        """
        conversation, settings = self.conversation, self.settings
        start, first, generated, whole = perf_counter(), None, 0, False
        screen = None
        progress = Progress(self.out, tokens=True)
        tokens = conversation.answer(
            settings.engine(self.suppressed),
            limit=settings.limit,
            stop=settings.stop,
            on_prefill=partial(progress, "reading"),
        )
        try:
            with progress:
                token = next(tokens, None)
                first = perf_counter()
            if not self.out.json:
                screen = AnswerScreen(
                    self.out, conversation.segmenter(), reasoning=self.reasoning, plain=self.plain
                )
            while token is not None:
                SIGNALS.check()
                generated += 1
                if screen is not None:
                    screen.add(token.text)
                token = next(tokens, None)
            whole = True
        except KeyboardInterrupt:
            with suppress(Terminated):  # once the answer is kept as far as it came
                SIGNALS.forget()
        finally:
            tokens.close()
            end = perf_counter()
            if answered := conversation.messages[-1].role == "assistant":
                self.turn = Turn(
                    prompt=conversation.tokens.prompt,
                    computed=conversation.tokens.computed,
                    generated=generated,
                    prompt_s=(first or end) - start,
                    decode_s=end - (first or end),
                )
            self._ended(screen, answered=answered)
        SIGNALS.check_terminated()
        if not whole and self.choose is not None:  # else the end of the run says it
            self.aside("interrupted")
        if conversation.messages[-1].finish_reason == "length":
            words = "the context is full: the answer ends there"
            if settings.limit is not None and generated >= settings.limit:
                more = "`-n N`" if self.choose is None else "`/set max_tokens N`"
                limit = counted(settings.limit, "token")
                words = f"the answer ends at the limit of {limit}: {more} allows more"
            self.out.note(words)
        if self.stats and answered and not self.out.json:
            self.out.aside(self.stats_line())
        return whole

    def aside(self, words: str) -> None:
        """A faint line on stderr."""
        from rich.text import Text

        self.out.aside(Text(words, style=FAINT))

    def _ended(self, screen: AnswerScreen | None, *, answered: bool) -> None:
        """Finishes the screen or writes the JSON line, and saves the answer if there is one."""
        try:
            if screen is not None:
                screen.finish()
            elif answered and self.out.json:
                self._line()
        finally:
            if answered and self.file is not None:
                self.save(self.file)

    def stats_line(self) -> str:
        """What the last answer took, where there was one, and how full the context is.

        `read 12 new of 1,031, 575 ms · wrote 256, 12.1 tok/s · context 1,287 of 8,192`.
        """
        context = f"context {self._used():,} of {self.conversation.room:,}"
        if (turn := self.turn) is None:
            return context
        from llmcli.ui.facts import draft_words
        from llmcli.ui.layout import SEPARATOR
        from llmcli.ui.numbers import duration, speed

        written = f", {speed((turn.generated - 1) / turn.decode_s)}" if turn.generated > 1 else ""
        parts = [
            f"read {turn.computed:,} new of {turn.prompt:,}, {duration(turn.prompt_s)}",
            f"wrote {turn.generated:,}{written}",
            context,
        ]
        if (speculation := self.conversation.speculation) is not None:
            parts.insert(2, f"draft {draft_words(speculation.describe())} so far")
        return SEPARATOR.join(parts)

    def _line(self) -> None:
        """Writes the turn as a line of JSON: the user's message and the answer."""
        assert self.turn is not None
        turn = vars(self.turn)
        found = members(self._transcript(self.conversation.messages[-2:]))
        found["tokens"] = {name: turn[name] for name in ("prompt", "computed", "generated")}
        found["timings"] = {name: turn[name] for name in ("prompt_s", "decode_s")}
        if (speculation := self.conversation.speculation) is not None:
            found["speculation"] = speculation.describe()
        head = header(self.conversation.model.describe())
        with SIGNALS.held():  # no half a line, and stdout is still there for the next one
            self.out.document(found, **head, lines=True)

    def save(self, path: str) -> None:
        """Writes the transcript, whole or not at all.

        Raises WriteFailed, also if the file has changed since this chat read or wrote it.
        """
        conversation = self.conversation
        place, state = real_path(path), state_of(path)
        if self.seen.get(place, state) != state:
            raise WriteFailed(
                f"could not write `{path}`: it has changed since this chat read it; "
                "another chat may save there",
                hint=f"`{'--' if self.choose is None else '/'}save FILE` saves under another name",
            )
        whole, head = self._transcript(conversation.messages), header(conversation.model.describe())
        write_document(path, self.out.envelope(members(whole), **head))
        self.seen[place] = state_of(path)
        self._kept = whole

    def save_changes(self) -> None:
        """Saves the conversation again if it has changed since it was saved or loaded.

        Nothing is saved before the first answer. Raises WriteFailed.
        """
        changed = self._kept != self._transcript(self.conversation.messages)
        if self.file is not None and self._kept is not None and changed:
            self.save(self.file)

    def _transcript(self, messages: Sequence[Message]) -> Transcript:
        conversation = self.conversation
        return Transcript(
            model=ModelName(name=conversation.model.name),
            vocabulary=conversation.model.config.vocab,
            sampling=self.settings,
            variables=conversation.variables,
            answers=conversation.answers,
            messages=tuple(messages),
        )

    def load(self, path: str) -> Transcript:
        """Continues a transcript: its messages, and its settings unless the user chose others here.

        Raises UsageError for any other file, CheckpointError if the template fails.
        """
        conversation = self.conversation
        state = state_of(path)
        found = read_transcript(path, self._transcript(()))
        messages = found.messages
        other = not found.is_of(conversation.model)
        if other:
            messages = tuple(replace(one, ids=(), lead="", raw=None) for one in messages)
        lost = conversation.load(messages, found.answers, {**found.variables, **self.variables})
        chosen = {name: getattr(self.settings, name) for name in self.chosen}
        self.settings = replace(found.sampling, **chosen)
        if other:
            self.out.note(
                f"`{found.model.name}` wrote the answers: `{conversation.model.name}` reads them "
                "as text"
            )
        elif lost:
            self.out.note(
                f"{counted(lost, 'answer')} came with ids of another text: the text is encoded"
            )
        self._kept = self._transcript(conversation.messages)
        self.seen[real_path(path)] = state
        return found

    def edit(self, text: str) -> None:
        """Adds an edit NAME[INDEX]=WHAT of all tokens, also earlier ones; `none` removes all.

        Raises UsageError for a wrong one.
        """
        from llmcli.inspect.edits import apply_edits

        model = self.conversation.model
        before = model.edits
        added = edit_requests([text], model.config) if text != "none" else ()
        model.edits = (*before, *added) if added else ()
        try:
            apply_edits(model, [])
        except UsageError:
            model.edits = before
            apply_edits(model, [])
            raise
        self.conversation.reread()

    def set_variable(self, name: str, value: Any) -> None:
        """Sets a variable of the template; it overrides those of transcripts.

        Raises UsageError for one that the template does not use.
        """
        conversation = self.conversation
        known = conversation.template_variables()
        check_name(name, known, conversation.model.name, others=NAMES, option="/set")
        self.variables[name] = value
        conversation.variables = {**conversation.variables, name: value}
