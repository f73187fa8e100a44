"""The output of a run of `generate`: text as it comes, or JSON, and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llmcli.commands.generate.measure import Run
from llmcli.commands.generate.report import Statistics
from llmcli.commands.generate.writers import Collector, TextWriter, TokenWriter, Writer
from llmcli.errors import LlmcliError
from llmcli.measure.environment import environment
from llmcli.records.text import Generated
from llmcli.shell.encoding import Encoded
from llmcli.shell.exits import SIGNALS, Stopped
from llmcli.shell.output import Output
from llmcli.shell.progress import Progress
from llmcli.shell.running import kernels_of
from llmcli.shell.sampling import Resolved
from llmcli.text.markers import Markers
from llmcli.text.segments import AnswerParts

if TYPE_CHECKING:
    from llmcli.commands.generate.command import GenerateOptions, Level

MARKER = 32  # tokens at the end of a prompt, in which it may begin the reasoning
LABEL_COLUMNS = 72  # of the line before each text of a batch


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """Everything is loaded, read and checked; `write` generates and writes.

    `level`: how much is said on stderr. `drawn`: the seed was drawn for this run.
    """

    out: Output
    options: GenerateOptions
    prompts: Sequence[Encoded]
    resolved: Resolved
    run: Run
    level: Level
    drawn: bool

    def write(self) -> None:
        """An interruption keeps what there is and ends with Stopped."""
        run, seed = self.run, self.run.request.sampling.seed
        writer = self._writer()
        if self.drawn and self.level == "off" and not (self.out.json or self.resolved.greedy):
            self.out.note(f"drew the seed {seed}: `--seed {seed}` gives the same text")
        try:
            for number, token in run.tokens(partial(Progress, self.out, tokens=True)):
                SIGNALS.check()
                writer.token(number, token, run.watch.elapsed * 1000)
        except KeyboardInterrupt as stop:
            writer.close()
            written = run.watch.total.generated
            if written:
                self._statistics()
            where = "" if written or self.out.quiet else run.unread()
            raise Stopped(stop, told=True, where=where) from stop
        except LlmcliError:
            if isinstance(writer, TextWriter):
                writer.close()  # the error begins on a line of its own
            raise
        writer.close()
        for tokens in run.reread:
            self.out.note(
                f"at {tokens:,} tokens the text outgrew LongRoPE's short factors: all of it was "
                "read again"
            )
        self._statistics()

    def _writer(self) -> Writer:
        samples, prompts = self.options.num_samples, len(self.prompts)
        tokenizer, logprobs = self.run.model.tokenizer, self.options.logprobs is not None
        if self.options.stream_json:
            begun = samples if prompts == 1 else 0
            model = self.run.model.describe()
            header = {"model": model, "environment": environment(kernels=kernels_of(model))}
            return TokenWriter(
                self.out, tokenizer=tokenizer, top=logprobs, begun=begun, header=header,
                parts=lambda number: self._parts(number // samples),
            )  # fmt: skip
        if self.out.json:
            return Collector(
                self._document, prompts=prompts, samples=samples, tokenizer=tokenizer,
                logprobs=logprobs,
            )  # fmt: skip
        colour = logprobs and self.out.out.colour
        if logprobs and not colour:
            self.out.note("`--logprobs` shows colours, which are off here: --json has the numbers")
        labels = None
        if self.options.batch is not None or samples > 1:
            labels = [self._label(number) for number in range(prompts * samples)]
        return TextWriter(self.out, labels=labels, colour=colour, ids_only=tokenizer is None)

    def _parts(self, index: int) -> AnswerParts | None:
        """Takes the answer to this prompt apart, where the chat template marks reasoning."""
        tokenizer, prompt = self.run.model.tokenizer, self.prompts[index]
        markers = Markers.of_tokenizer(tokenizer)
        if tokenizer is None or not (prompt.chat and markers.reasoning):
            return None
        return AnswerParts(markers, tokenizer.decode(prompt.ids[-MARKER:], skip_special=False))

    def _number(self, number: int) -> str:
        """`1` for a sample or a prompt of a batch, `0.1` for its samples, empty for one text."""
        prompt, sample = divmod(number, self.options.num_samples)
        if self.options.batch is None:
            return str(sample) if self.options.num_samples > 1 else ""
        return str(prompt) if self.options.num_samples == 1 else f"{prompt}.{sample}"

    def _label(self, number: int) -> str:
        """`_number`, with the prompt where there are several: `0 · What is …`."""
        if self.options.batch is None:
            return self._number(number)
        from rich.text import Text

        from llmcli.ui.theme import one_line

        given = self.prompts[number // self.options.num_samples]
        words = given.text if given.text is not None else f"ids {', '.join(map(str, given.ids))}"
        label = Text(f"{self._number(number)} · {one_line(words)}")
        label.truncate(min(self.out.out.width, LABEL_COLUMNS) - len("--- "), overflow="ellipsis")
        return label.plain

    def _document(self, index: int, outputs: list[Generated]) -> None:
        """One prompt's JSON document; a batch has one a line, with its `index`."""
        run, batch = self.run, self.options.batch is not None
        for output in outputs:
            if (parts := self._parts(index)) is not None:
                begun, rest = parts.push(output.text), parts.finish()
                output.content = begun.content + rest.content
                output.reasoning = (begun.reasoning + rest.reasoning).rstrip()
        model = run.model.describe()
        body: dict[str, Any] = {"index": index} if batch else {}
        body |= {
            "prompt": self.prompts[index],
            "outputs": outputs,
            "sampling": {
                **self.resolved.values,
                "seed": run.request.sampling.seed,
                "greedy": self.resolved.greedy,
                "max_tokens": self.options.max_tokens,
                "stop": run.request.stop,
                "origins": self.resolved.origins,
                "ignored": self.resolved.ignored,
            },
            "path": {
                **run.model.arithmetic.describe(run.model.config),
                "kernels": kernels_of(model),
                "sequences": run.side_by_side[index],
            },
            "timings": run.watch.timings(run.tallies[index]),
        }
        if run.speculation is not None:
            body["speculation"] = run.speculation.describe()
        header = environment(kernels=kernels_of(model))
        self.out.document(body, model=model, environment=header, lines=batch)

    def _statistics(self) -> None:
        """Speed, memory and settings on stderr, and what the colours mean."""
        if self.level == "off":
            return
        from llmcli.commands.generate.view import full_stats, short_stats, template_line
        from llmcli.ui.facts import confidence_legend

        out, greedy = self.out, self.resolved.greedy
        text = not (out.json or self.options.stream_json)
        if text and self.options.logprobs is not None and out.out.colour:
            out.aside(confidence_legend(ties=greedy))
        watched = out.out.terminal and out.err.terminal and not out.quiet
        if text and watched and any(one.chat and not one.messages for one in self.prompts):
            out.aside(template_line())
        found = self._found()
        out.aside(short_stats(found, out.err.width) if self.level == "short" else full_stats(found))

    def _found(self) -> Statistics:
        run, model = self.run, self.run.model.describe()
        greedy, origins = self.resolved.greedy, self.resolved.origins
        ties = tuple(replace(tie, label=self._number(number)) for number, tie in run.ties)
        ended = "context full" if run.full else ""
        return Statistics(
            timings=run.watch.timings(),
            model=model,
            environment=environment(kernels=kernels_of(model)),
            sampling={
                name: (value, str(origins[name])) for name, value in self.resolved.values.items()
            },
            seed=None if greedy else run.request.sampling.seed,
            ties=ties if greedy else None,
            side_by_side=max(run.side_by_side, default=1),
            speculation=None if run.speculation is None else run.speculation.describe(),
            ended=f"-n {run.request.limit}" if run.limited else ended,
        )
