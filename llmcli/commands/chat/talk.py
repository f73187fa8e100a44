"""A conversation on the terminal: answers as they come, what they took, and the file they go to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llmcli.cli.exits import SIGNALS, Terminated
from llmcli.cli.output import Output, write_document
from llmcli.cli.progress import Progress
from llmcli.cli.running import kernels_of
from llmcli.cli.transcript import Transcript, body, read_transcript
from llmcli.cli.variables import check_name
from llmcli.commands.chat.screen import AnswerScreen, ReasoningMode
from llmcli.commands.chat.settings import NAMES, Settings
from llmcli.commands.chat.turn import Turn, stats_line, took
from llmcli.errors import LlmcliError, PromptTooLong, UsageError
from llmcli.observe.environment import environment
from llmcli.reports.numbers import counted
from llmcli.ui.theme import FAINT

if TYPE_CHECKING:
    from llmcli.generation.conversation import Conversation
    from llmcli.generation.messages import Message
    from llmcli.reports.environment import Environment


ANSWER = 64  # tokens that an answer has room for, or the user is asked what to drop


@dataclass(kw_only=True)
class Talk:
    """A conversation with its settings; `file` is written anew after every answer and change.

    `chosen` are the settings and `variables` those of the template that the user has named: they
    win over a transcript's. `typed` is what was typed for a text with files in it, and `choose`
    asks the user for a letter where the context fills.
    """

    conversation: Conversation
    settings: Settings
    out: Output
    file: str | None = None
    turn: Turn | None = None
    stats: bool = False
    reasoning: ReasoningMode | None = None
    plain: bool = False
    chosen: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    choose: Callable[[str], str] | None = None
    typed: dict[str, str] = field(default_factory=dict)
    _kept: Transcript | None = None  # what the file has

    def say(self, text: str, *, instead: bool = False) -> bool:
        """What the user says (`instead` of what was last said), and the answer.

        Where there is none, nothing was said. False where Ctrl-C ended it.
        """
        talk = self.conversation
        with self._or_as_before():
            if instead:
                talk.undo()
            talk.say(text)
            try:
                return self._has_room() and self.answer()
            except PromptTooLong:
                self._check_alone()
                raise

    def _check_alone(self) -> None:
        """Raises PromptTooLong where the last message does not fit, whatever is dropped."""
        talk = self.conversation
        messages, asked = talk.messages, talk.messages[-1]
        talk.clear()
        talk.messages = [*talk.messages, asked]
        over = talk.missing(1)
        talk.messages = messages
        if over:
            raise PromptTooLong(
                f"the message takes {talk.room + over:,} tokens with what the template puts around "
                f"it, {over:,} more than the context of {talk.room:,}",
                hint="say less at once",
            )

    def _has_room(self) -> bool:
        """Whether an answer is to begin; where the context fills, that is for the user to say."""
        talk = self.conversation
        least = min(ANSWER, self.settings.max_tokens, talk.room // 4)
        if self.choose is None or len(talk.messages) < 2 or not talk.missing(least):
            return True
        self._check_alone()
        self.out.aside(f"the context of {talk.room:,} tokens has no room for another answer")
        chosen = self.choose("[d]rop the oldest turns, [c]lear, or Enter to cancel? ")
        if not chosen or chosen not in "dc":
            self.out.note("nothing was said")
            return False
        before, asked = len(talk.ids()), talk.messages[-1]
        if chosen == "c":
            talk.clear()
            talk.messages = [*talk.messages, asked]
            what = "all that was said before"
        else:
            what = counted(talk.drop_turns(least), "oldest turn")
        if not talk.missing(1):
            self.out.note(f"dropped {what}, {counted(before - len(talk.ids()), 'token')}")
        return True

    def meter(self) -> str:
        """How full the context is, for the prompt: `1,204 / 8,192`."""
        return f"{self._used():,} / {self.conversation.room:,}"

    def _used(self) -> int:
        """Tokens of the context that the conversation takes."""
        talk = self.conversation
        try:
            tokens = len(talk.ids())
        except LlmcliError:  # the template fails, which the next answer will say
            tokens = talk.used
        return min(tokens, talk.room)

    def again(self) -> bool:
        """Another answer to what was last said; the one that is there stays where none comes."""
        talk = self.conversation
        with self._or_as_before():
            if talk.messages and talk.messages[-1].role == "assistant":
                talk.messages = talk.messages[:-1]
            if not talk.messages or talk.messages[-1].role != "user":
                raise UsageError("there is nothing to answer")
            return self.answer()

    @contextmanager
    def _or_as_before(self) -> Iterator[None]:
        """The messages are as before where no answer came: refused, or stopped too early."""
        talk = self.conversation
        before, answers = list(talk.messages), talk.answers
        try:
            yield
        finally:
            if talk.answers == answers or talk.messages[-1].role == "user":
                talk.messages = before

    def answer(self) -> bool:
        """Writes the model's answer as it comes; False where Ctrl-C ended it.

        What there is then, or where an error ended it, stays, and is told and saved as a whole one
        is. Raises the errors of `Conversation.answer`.
        """
        talk, settings = self.conversation, self.settings
        start, first, generated, whole = perf_counter(), None, 0, False
        screen = None
        progress = Progress(self.out, tokens=True)
        tokens = talk.answer(
            settings.drawn(), limit=settings.max_tokens, stop=settings.stop,
            on_prefill=partial(progress, "reading"),
        )  # fmt: skip
        try:
            with progress:
                token = next(tokens, None)
                first = perf_counter()
            if not self.out.json:
                screen = AnswerScreen(
                    self.out, talk.segmenter(), reasoning=self.reasoning, plain=self.plain
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
            if answered := talk.messages[-1].role == "assistant":
                self.turn = Turn(
                    prompt=talk.tokens.prompt, read=talk.tokens.computed, generated=generated,
                    prompt_s=(first or end) - start, decode_s=end - (first or end),
                )  # fmt: skip
            self._ended(screen, answered=answered)
        SIGNALS.check_terminated()
        if not whole and self.choose is not None:  # else the end of the run says it
            self.aside("interrupted")
        if talk.messages[-1].end == "length":
            self.out.note(self._cut_by(generated))
        if self.stats and answered and not self.out.json:
            self.out.aside(self.stats_line())
        return whole

    def _cut_by(self, generated: int) -> str:
        """What ended an answer of so many tokens before the model did."""
        if generated < self.settings.max_tokens:
            return "the context is full: the answer ends there"
        more = "`-n N`" if self.choose is None else "`/set max_tokens N`"
        limit = counted(self.settings.max_tokens, "token")
        return f"the answer ends at the limit of {limit}: {more} allows more"

    def aside(self, words: str) -> None:
        """A faint line on stderr."""
        from rich.text import Text

        self.out.aside(Text(words, style=FAINT))

    def _ended(self, screen: AnswerScreen | None, *, answered: bool) -> None:
        """Tells and saves the answer, where there is one."""
        try:
            if screen is not None:
                screen.finish()
            elif answered and self.out.json:
                self._line()
        finally:
            if answered and self.file is not None:
                self.save(self.file)

    def stats_line(self) -> str:
        """What the last answer took, and how full the context is."""
        return stats_line(self.turn, self.conversation, self._used())

    def _line(self) -> None:
        """The turn as a line of JSON: what the user said, and the answer."""
        assert self.turn is not None
        about, header = self._about()
        turn = body(self._transcript(self.conversation.messages[-2:]))
        told = turn | took(self.turn, self.conversation)
        with SIGNALS.held():  # no half a line, and stdout is still there for the next one
            self.out.document(told, model=about, environment=header, lines=True)

    def save(self, path: str) -> None:
        """Writes the transcript, whole or not at all; raises WriteFailed."""
        about, header = self._about()
        whole = body(self._transcript(self.conversation.messages))
        write_document(path, self.out.envelope(whole, model=about, environment=header))
        self._kept = self._transcript(self.conversation.messages)

    def follow(self) -> None:
        """Writes the file anew where the conversation has changed since the file had it.

        It has it from the first answer on, or from `load`. Raises WriteFailed.
        """
        changed = self._kept != self._transcript(self.conversation.messages)
        if self.file is not None and self._kept is not None and changed:
            self.save(self.file)

    def _transcript(self, messages: Sequence[Message]) -> Transcript:
        talk = self.conversation
        return Transcript(
            model=talk.model.name, vocabulary=talk.model.config.vocab,
            sampling=dict(self.settings.sampling), seed=self.settings.seed,
            max_tokens=self.settings.max_tokens, stop=self.settings.stop,
            variables=talk.variables, answers=talk.answers, messages=tuple(messages),
        )  # fmt: skip

    def _about(self) -> tuple[Mapping[str, Any], Environment]:
        about = self.conversation.model.describe()
        return about, environment(kernels=kernels_of(about))

    def load(self, path: str) -> Transcript:
        """Goes on with a transcript: its messages, and its settings where none was chosen here.

        Raises UsageError for a file that is none, CheckpointError where the template fails.
        """
        talk = self.conversation
        found = read_transcript(path, self._transcript(()))
        messages = found.messages
        other = not found.is_of(talk.model)
        if other:
            messages = tuple(replace(one, ids=(), raw=None) for one in messages)
        lost = talk.load(messages, found.answers, {**found.variables, **self.variables})
        kept = {name: value for name, value in found.sampling.items() if name not in self.chosen}
        self.settings.sampling |= kept
        for name in ("seed", "max_tokens", "stop"):
            if name not in self.chosen:
                setattr(self.settings, name, getattr(found, name))
        if other:
            self.out.note(
                f"`{found.model}` wrote the answers: `{talk.model.name}` reads them as text"
            )
        elif lost:
            self.out.note(
                f"{counted(lost, 'answer')} came with ids of another text: the text is encoded"
            )
        self._kept = self._transcript(talk.messages)
        return found

    def set_variable(self, name: str, value: Any) -> None:
        """A variable of the template, from now on; it wins over those of transcripts.

        Raises UsageError for one that the template does not look up.
        """
        talk = self.conversation
        known = talk.template_variables()
        check_name(name, known, talk.model.name, others=NAMES, option="/set")
        self.variables[name] = value
        talk.variables = {**talk.variables, name: value}
