"""One run of `generate`: tokens from the engine to whoever writes them, timed on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llmcli.cli.encoding import Encoded
from llmcli.cli.exits import SIGNALS, Stopped
from llmcli.cli.output import Output
from llmcli.cli.progress import Progress
from llmcli.cli.running import Loaded, kernels_of
from llmcli.cli.sampling import Resolved
from llmcli.commands.generate.batch import groups
from llmcli.commands.generate.measure import Stopwatch, Tally
from llmcli.commands.generate.writers import Collector, TextWriter, TokenWriter, Writer
from llmcli.errors import LlmcliError
from llmcli.observe.environment import environment
from llmcli.reports.text import Generated, NearTie

if TYPE_CHECKING:
    from llmcli.commands.generate.command import GenerateOptions
    from llmcli.generation import Token
    from llmcli.generation.speculation import Speculation


LABEL_COLUMNS = 72  # of the line before each text of a batch


class Job:
    """Everything is loaded, read and checked; `write` does it.

    `room`: the most tokens that a sequence may have, its prompt included.
    """

    def __init__(
        self,
        loaded: Loaded,
        encoded: list[Encoded],
        resolved: Resolved,
        text: GenerateOptions,
        seed: int,
        room: int,
        out: Output,
        speculation: Speculation | None = None,
    ) -> None:
        self.model = loaded.model
        self.encoded = encoded
        self.resolved = resolved
        self.text = text
        self.seed = seed
        self.room = room
        self.speculation = speculation
        self.out = out
        self.read = 0  # tokens of the first prompts that the model has read
        self.reread: list[int] = []  # how many tokens were read once more, and once more
        self.watch = Stopwatch(self.model.device)
        self.tallies = [Tally() for _ in encoded]  # of each prompt
        self.together = [1] * len(encoded)  # texts written side by side with each prompt's
        self.ties: list[NearTie] = []
        self.limited = False  # a text had the most tokens that were asked for
        self.watch.peaks = loaded.peaks
        self.watch.import_s, self.watch.load_s = loaded.import_s, loaded.load_s

    def write(self, *, drawn: bool) -> None:
        """Generates and writes; an interruption keeps what there is and ends with Stopped."""
        writer = self._writer()
        level = self._level()
        if drawn and level == "off" and not (self.out.json or self.resolved.greedy):
            self.out.note(f"drew the seed {self.seed}: `--seed {self.seed}` gives the same text")
        try:
            for number, token in self._tokens():
                SIGNALS.check()
                writer.token(number, token, self.watch.elapsed * 1000)
                self.limited |= token.finish == "length" and token.index + 1 == self.text.max_tokens
                if token.tied and token.margin is not None:
                    text = self.model.token_text(token.id) or str(token.id)
                    label = self._number(number)
                    self.ties.append(
                        NearTie(label=label, index=token.index, text=text, margin=token.margin)
                    )
        except KeyboardInterrupt as stop:
            writer.close()
            if self.watch.total.generated:
                self._statistics(level)
            raise Stopped(stop, told=True, where=self._where()) from stop
        except LlmcliError:
            if isinstance(writer, TextWriter):
                writer.close()  # the error begins on a line of its own
            raise
        writer.close()
        for tokens in self.reread:
            self.out.note(
                f"at {tokens:,} tokens the text outgrew LongRoPE's short factors: all of it was "
                "read again"
            )
        self._statistics(level)

    def _tokens(self) -> Iterator[tuple[int, Token]]:
        """All tokens with the number of their sequence: prompt · samples + sample."""
        from llmcli.generation import stream

        samples = self.text.num_samples
        sampling = self.resolved.sampling(self.seed)
        for group in groups([len(item.ids) for item in self.encoded], samples=samples):
            prompts = [self.encoded[index].ids for index in group]
            for index in group:
                self.together[index] = len(group) * samples
            with Progress(self.out, tokens=True) as progress:

                def read(done: int, total: int, progress: Progress = progress) -> None:
                    self.read = done
                    progress("reading the prompt", done, total)

                tokens = stream(
                    self.model,
                    prompts,
                    sampling,
                    limit=self.text.max_tokens,
                    stop=self.text.stop or (),
                    ignore_eos=self.text.ignore_eos,
                    logprobs=self._logprobs(),
                    margins=self._margins(),
                    samples=samples,
                    capacity=self.room,
                    on_prefill=read,
                    on_reread=self.reread.append,
                    speculation=self.speculation,
                )
                watched = self.watch.watch(tokens, sum(map(len, prompts)))
                first = next(watched, None)
            for token in _chained(first, watched):
                row, sample = divmod(token.sequence, samples)
                self.watch.credit(self.tallies[group[row]], token, len(prompts[row]))
                yield group[row] * samples + sample, token

    def _where(self) -> str:
        """What an interruption before the first token cut short; nothing with `--quiet`."""
        if self.watch.total.generated or self.out.quiet:
            return ""
        lengths = [len(item.ids) for item in self.encoded]
        first = groups(lengths, samples=self.text.num_samples)[0]
        total = sum(lengths[index] for index in first)
        return f" while reading the prompt ({self.read} of {total} tokens)"

    def _logprobs(self) -> int | None:
        return 0 if self.text.stream_json and self.text.logprobs is None else self.text.logprobs

    def _margins(self) -> bool:
        """Whether the output marks greedy tokens that are near ties."""
        documents = self.out.json or self.text.stream_json
        return documents or self.text.logprobs is not None or self._level() == "full"

    def _writer(self) -> Writer:
        samples, prompts = self.text.num_samples, len(self.encoded)
        if self.text.stream_json:
            return TokenWriter(
                self.out,
                tokenizer=self.model.tokenizer,
                top=self.text.logprobs is not None,
                begun=samples if prompts == 1 else 0,
            )
        if self.out.json:
            return Collector(
                self._document,
                prompts=prompts,
                samples=samples,
                tokenizer=self.model.tokenizer,
                logprobs=self.text.logprobs is not None,
            )
        colour = self.text.logprobs is not None and self.out.out.colour
        if self.text.logprobs is not None and not colour:
            self.out.note("`--logprobs` shows colours, which are off here: --json has the numbers")
        labels = None
        if self.text.batch is not None or samples > 1:
            labels = [self._label(number) for number in range(prompts * samples)]
        return TextWriter(
            self.out,
            labels=labels,
            colour=colour,
            ids_only=self.model.tokenizer is None,
        )

    def _number(self, number: int) -> str:
        """`1` for a sample or a prompt of a batch, `0.1` for its samples, empty for one text."""
        prompt, sample = divmod(number, self.text.num_samples)
        if self.text.batch is None:
            return str(sample) if self.text.num_samples > 1 else ""
        return str(prompt) if self.text.num_samples == 1 else f"{prompt}.{sample}"

    def _label(self, number: int) -> str:
        """The same, and `0 · What is …` with the prompt where there are several."""
        if self.text.batch is None:
            return self._number(number)
        from rich.text import Text

        from llmcli.ui.theme import one_line

        given = self.encoded[number // self.text.num_samples]
        words = given.text if given.text is not None else f"ids {', '.join(map(str, given.ids))}"
        label = Text(f"{self._number(number)} · {one_line(words)}")
        label.truncate(min(self.out.out.width, LABEL_COLUMNS) - len("--- "), overflow="ellipsis")
        return label.plain

    def _document(self, index: int, outputs: list[Generated]) -> None:
        """One prompt's JSON document; a batch has one a line, each whole, with its `index`."""
        batch = self.text.batch is not None
        body: dict[str, Any] = {"index": index} if batch else {}
        body |= {
            "prompt": _prompt(self.encoded[index]),
            "outputs": [_without_none(output) for output in outputs],
            "sampling": {
                **self.resolved.values,
                "seed": self.seed,
                "greedy": self.resolved.greedy,
                "max_tokens": self.text.max_tokens,
                "stop": self.text.stop or [],
                "origins": self.resolved.origins,
                "ignored": self.resolved.ignored,
            },
            "path": {
                **self.model.arithmetic.describe(self.model.config),
                "kernels": kernels_of(self.model.describe()),
                "sequences": self.together[index],
            },
            "timings": self.watch.timings(self.tallies[index]),
        }
        if self.speculation is not None:
            body["speculation"] = self.speculation.describe()
        header = environment(kernels=kernels_of(self.model.describe()))
        self.out.document(body, model=self.model.describe(), environment=header, lines=batch)

    def _level(self) -> str:
        """How much is told on stderr: what was asked for, else one line on a terminal."""
        if self.text.stats is not None:
            return self.text.stats
        text = not (self.out.json or self.text.stream_json or self.out.quiet)
        return "short" if text and self.out.err.terminal else "off"

    def _statistics(self, level: str) -> None:
        """Speed, memory and settings on stderr."""
        if level == "off":
            return
        seed = None if self.resolved.greedy else self.seed
        from llmcli.observe.environment import environment
        from llmcli.ui.stats import (
            confidence_legend,
            full_stats,
            model_line,
            short_stats,
            template_line,
        )

        timings, model = self.watch.timings(), self.model.describe()
        coloured = not (self.out.json or self.text.stream_json) and self.out.out.colour
        if self.text.logprobs is not None and coloured:
            self.out.aside(confidence_legend(ties=self.resolved.greedy))
        watched = self.out.out.terminal and self.out.err.terminal and not self.out.quiet
        text = not (self.out.json or self.text.stream_json)
        if text and watched and any(item.chat and not item.messages for item in self.encoded):
            self.out.aside(template_line())
        drafted = None if self.speculation is None else self.speculation.describe()
        if level == "short":
            weights = model["weight_format"]
            ended = f"ended by `-n {self.text.max_tokens}`" if self.limited else ""
            self.out.aside(
                short_stats(timings, weights, seed, self.out.err.width, drafted, ended=ended)
            )
            return
        values, origins = self.resolved.values, self.resolved.origins
        sampling = {name: (value, str(origins[name])) for name, value in values.items()}
        ties = tuple(self.ties) if self.resolved.greedy else None
        header = environment(kernels=kernels_of(self.model.describe()))
        together = max(self.together, default=1)
        self.out.aside(
            full_stats(
                timings, sampling, seed, model_line(model), header, ties, together, drafted
            )
        )


def _chained(first: Token | None, rest: Iterator[Token]) -> Iterator[Token]:
    if first is not None:
        yield first
        yield from rest


def _prompt(encoded: Encoded) -> dict[str, Any]:
    """`messages` of a conversation only."""
    found = asdict(encoded)
    if encoded.messages is None:
        del found["messages"]
    return found


def _without_none(output: Generated) -> dict[str, Any]:
    return {name: value for name, value in asdict(output).items() if value is not None}
