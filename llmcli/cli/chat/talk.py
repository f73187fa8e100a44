"""A conversation on the terminal: answers as they come, what they took, and the file they go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llmcli.cli.chat.transcript import Transcript, body, read_transcript
from llmcli.cli.exits import SIGNALS, tell
from llmcli.cli.output import Output, write_document
from llmcli.cli.progress import Progress
from llmcli.cli.running import kernels_of
from llmcli.errors import LlmcliError
from llmcli.measure.environment import environment
from llmcli.render.theme import printable

if TYPE_CHECKING:
    from llmcli.generation.conversation import Conversation, Message
    from llmcli.generation.sampling import Sampling
    from llmcli.reports.environment import Environment


@dataclass(kw_only=True)
class Settings:
    """How the next answer is drawn; `/set` changes it."""

    sampling: dict[str, float]
    seed: int
    max_tokens: int
    stop: tuple[str, ...] = ()

    def drawn(self) -> Sampling:
        """What the engine takes."""
        from llmcli.generation.sampling import Sampling

        values = {name: value for name, value in self.sampling.items() if name != "top_k"}
        return Sampling(top_k=int(self.sampling["top_k"]), seed=self.seed, **values)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the last answer took. `read` of the prompt's tokens were new to the model."""

    prompt: int
    read: int
    generated: int
    prompt_s: float
    decode_s: float


@dataclass(kw_only=True)
class Talk:
    """A conversation with its settings; `file` is written anew after every answer."""

    conversation: Conversation
    settings: Settings
    out: Output
    file: str | None = None
    turn: Turn | None = None
    stats: bool = False
    chosen: Mapping[str, str] = field(default_factory=dict)

    def say(self, text: str) -> bool:
        """What the user says, and the answer; takes it back where there is none."""
        talk = self.conversation
        talk.say(text)
        try:
            return self.answer()
        finally:
            if talk.messages[-1].role == "user":  # refused, or stopped before the first token
                talk.undo()

    def answer(self) -> bool:
        """Writes the model's answer as it comes; False where Ctrl-C ended it.

        What there is then stays. Raises the errors of `Conversation.answer`.
        """
        talk, settings = self.conversation, self.settings
        json = self.out.json
        start, first, generated = perf_counter(), None, 0
        text = ""
        try:
            with Progress(self.out, tokens=True) as progress:

                def read(done: int, total: int) -> None:
                    progress("reading", done, total)

                tokens = talk.answer(
                    settings.drawn(), limit=settings.max_tokens, stop=settings.stop,
                    on_prefill=read,
                )  # fmt: skip
                token = next(tokens, None)
                first = perf_counter()
            while token is not None:
                SIGNALS.check()
                generated += 1
                text += token.text
                if not json:
                    shown = printable(token.text) if self.out.out.terminal else token.text
                    self.out.write(shown)
                token = next(tokens, None)
            whole = True
        except KeyboardInterrupt:
            if first is not None:
                tokens.close()
            SIGNALS.forget()
            whole = False
        end = perf_counter()
        self.turn = Turn(
            prompt=talk.tokens.prompt, read=talk.tokens.computed, generated=generated,
            prompt_s=(first or end) - start, decode_s=end - (first or end),
        )  # fmt: skip
        if json and generated:
            self._line()
        elif not json and not text.endswith("\n") and (text or self.out.out.terminal):
            self.out.write("\n")
        if generated and self.file is not None:
            self.save(self.file)
        return whole

    def _line(self) -> None:
        """The turn as a line of JSON: what the user said, and the answer."""
        assert self.turn is not None
        about, header = self._about()
        took = {
            "tokens": {
                "prompt": self.turn.prompt, "computed": self.turn.read,
                "generated": self.turn.generated,
            },
            "timings": {"prompt_s": self.turn.prompt_s, "decode_s": self.turn.decode_s},
        }  # fmt: skip
        turn = body(self._transcript(self.conversation.messages[-2:]))
        self.out.document(turn | took, model=about, environment=header, lines=True)

    def save(self, path: str) -> None:
        """Writes the transcript, whole or not at all; raises WriteFailed."""
        about, header = self._about()
        whole = body(self._transcript(self.conversation.messages))
        write_document(path, self.out.envelope(whole, model=about, environment=header))

    def _transcript(self, messages: Sequence[Message]) -> Transcript:
        talk = self.conversation
        return Transcript(
            model=talk.model.name, vocabulary=talk.model.config.vocab,
            sampling=self.settings.sampling, seed=self.settings.seed,
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
        found = read_transcript(path)
        talk = self.conversation
        messages = found.messages
        if found.vocabulary != talk.model.config.vocab or found.model != talk.model.name:
            self.out.note(
                f"`{found.model}` wrote the answers: `{talk.model.name}` reads them as text"
            )
            messages = tuple(replace(one, ids=()) for one in messages)
        kept = {name: value for name, value in found.sampling.items() if name not in self.chosen}
        self.settings.sampling.update(kept)
        if "seed" not in self.chosen:
            self.settings.seed = found.seed
        if "max_tokens" not in self.chosen:
            self.settings.max_tokens = found.max_tokens
        self.settings.stop = found.stop
        talk.variables = dict(found.variables) | talk.variables
        before = (talk.messages, talk.answers)
        try:
            talk.load(messages, found.answers)
        except LlmcliError:
            talk.messages, talk.answers = before
            raise
        return found


def tell_error(error: LlmcliError) -> None:
    """One line and its hint, as at the end of a run; the conversation goes on."""
    tell(f"error: {error.message}")
    if error.hint:
        tell(f"hint: {error.hint}")
