"""How generated tokens reach stdout: as text while they come, as JSON, or as a line a token."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.commands.generate.measure import Run
from llmcli.commands.generate.report import ComputePath, RunReport, SamplingReport
from llmcli.errors import LlmcliError
from llmcli.records.document import members
from llmcli.records.text import Alternative, Generated, TokenLogprob
from llmcli.shell.exits import SIGNALS, Stopped
from llmcli.shell.output import Output, colour_system, dumps
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import Prompt
from llmcli.shell.running import header, note_edits
from llmcli.shell.sampling import Resolved
from llmcli.text.segments import Answer, AnswerParts, Markers
from llmcli.ui.theme import FAINT, confidence_style, one_line, printable

if TYPE_CHECKING:
    from llmcli.commands.generate.command import GenerateOptions, Level
    from llmcli.engine.output import Token

MARKER = 32  # tokens at the end of a prompt, in which it may begin the reasoning
LABEL_COLUMNS = 72  # of the line before each text of a batch


@dataclass(kw_only=True)
class Presentation(ABC):
    """Everything is loaded, read and checked; `write` generates and writes.

    `level`: which statistics stderr gets. `drawn`: the seed was drawn for this run. Each subclass
    writes one format: it takes the tokens of numbered sequences as they come, interleaved, and is
    closed after the last one or an interruption.
    """

    out: Output
    options: GenerateOptions
    prompts: Sequence[Prompt]
    resolved: Resolved
    run: Run
    level: Level
    drawn: bool
    text: ClassVar[bool] = False  # what stdout gets is no JSON

    @abstractmethod
    def __post_init__(self) -> None:
        """Prepares the format."""

    @abstractmethod
    def token(self, number: int, token: Token) -> None:
        """Takes a token of the sequence `number`."""

    @abstractmethod
    def close(self) -> None:
        """Writes what is held back."""

    def write(self) -> None:
        """Generates and writes. An interruption keeps what there is and raises Stopped."""
        run, seed = self.run, self.run.request.sampling.seed
        if self.drawn and self.level == "off" and not (self.out.json or self.resolved.greedy):
            self.out.note(f"drew the seed {seed}: `--seed {seed}` gives the same text")
        try:
            for number, token in run.tokens(partial(Progress, self.out, tokens=True)):
                SIGNALS.check()
                self.token(number, token)
        except KeyboardInterrupt as stop:
            self.close()
            written = run.watch.total.generated
            if written:
                self._statistics()
            where = "" if written or self.out.quiet else run.unread()
            raise Stopped(stop, reported=True, where=where) from stop
        except LlmcliError:
            if self.text:
                self.close()  # the error begins on a line of its own
            raise
        self.close()
        note_edits(run.model, self.out)
        for tokens in run.reprefilled:
            self.out.note(
                f"at {tokens:,} tokens the text outgrew LongRoPE's short factors: all of it was "
                "read again"
            )
        self._statistics()

    @cached_property
    def samples(self) -> int:
        """Sequences of each prompt; number = prompt · samples + sample."""
        return self.run.request.samples

    @cached_property
    def header(self) -> Mapping[str, Any]:
        """The model and the environment, as documents have them."""
        return header(self.run.model.describe())

    def parts(self, index: int) -> AnswerParts | None:
        """Splits the answer to this prompt; None if its template marks no reasoning."""
        tokenizer, prompt = self.run.model.tokenizer, self.prompts[index]
        markers = Markers.of_tokenizer(tokenizer)
        if tokenizer is None or not (prompt.chat and markers.reasoning):
            return None
        return AnswerParts(markers, tokenizer.decode(prompt.ids[-MARKER:], skip_special=False))

    def alternatives(self, token: Token) -> tuple[Alternative, ...]:
        """The likeliest tokens in place of this one."""
        text = self.run.model.token_text
        return tuple(Alternative(id=id, text=text(id), logprob=each) for id, each in token.top)

    def name(self, number: int) -> str:
        """`1` for a sample or a prompt of a batch, `0.1` for its samples, empty for one text."""
        prompt, sample = divmod(number, self.samples)
        named = [prompt] * (self.options.batch is not None) + [sample] * (self.samples > 1)
        return ".".join(map(str, named))

    def _statistics(self) -> None:
        """Speed, memory and settings on stderr, and what the colours mean."""
        if self.level == "off":
            return
        from llmcli.commands.generate.view import TEMPLATE, full_stats, short_stats
        from llmcli.ui.facts import confidence_legend

        out, run, report = self.out, self.run, self.report()
        if self.text and self.options.logprobs is not None and out.out.colour:
            legend = confidence_legend(ties=self.resolved.greedy)
            out.aside(legend.append(" · --json has the numbers", style=FAINT))
        watched = out.out.terminal and out.err.terminal and not out.quiet
        if self.text and watched and any(one.chat and not one.messages for one in self.prompts):
            out.aside(TEMPLATE)
        if self.level == "short":
            other = "context full" if run.full else "stop text" * run.stopped
            ended = f"-n {run.request.limit}" if run.limited else other
            out.aside(short_stats(report, ended, out.err.width))
            return
        ties = [
            (run.model.token_text(token.id) or str(token.id), token.index, self.name(number))
            for number, token in run.ties
        ]
        out.aside(full_stats(report, ties, **self.header))

    def report(self, index: int | None = None) -> RunReport:
        """How the texts of one prompt were generated; without an `index`, of all prompts."""
        run, resolved, request = self.run, self.resolved, self.run.request
        return RunReport(
            sampling=SamplingReport(
                **vars(resolved.values),
                greedy=resolved.greedy,
                max_tokens=-1 if request.limit is None else request.limit,
                stop=tuple(request.stop),
                origins=resolved.origins,
                ignored=resolved.ignored,
            ),
            path=ComputePath(
                **run.model.precision.describe(run.model.config),
                kernels=self.header["environment"].kernels,
                sequences=max(run.side_by_side) if index is None else run.side_by_side[index],
            ),
            timings=run.watch.timings(None if index is None else run.tallies[index]),
            speculation=None if run.speculation is None else run.speculation.describe(),
        )


class TextWriter(Presentation):
    """The text of each sequence, one after the other; the first unfinished one is live.

    A line `--- label` goes before each of several. With `--logprobs` each token's text has the
    colour of its probability, and near ties are underlined. On a terminal lines break between
    words, control characters are spelled out and the cursor ends on a new line.
    """

    text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        from llmcli.ui.flow import Flow

        wanted = self.options.logprobs is not None
        self._colour = wanted and self.out.out.colour
        if wanted and not self._colour:
            self.out.note("`--logprobs` shows colours, which are off here: --json has the numbers")
        self._several = self.options.batch is not None or self.samples > 1
        self._flow = Flow(self.out.out.width, colour=self._colour, system=colour_system())
        self._live = 0
        self._waiting: dict[int, list[tuple[str, str]]] = {}  # texts and their styles
        self._finished: set[int] = set()
        self._headed = -1
        self._column_zero = True

    def token(self, number: int, token: Token) -> None:
        """Writes the token, or keeps it until the sequences before it are finished."""
        text, style = token.text, ""
        if self.run.model.tokenizer is None:
            text = f"{token.id} "
        if self.out.out.terminal:
            text = printable(text)
        if self._colour and token.logprob is not None:
            tied = " underline" if token.tied else ""
            style = f"{confidence_style(math.exp(token.logprob))}{tied}"
        self._waiting.setdefault(number, []).append((text, style))
        if token.finish is not None:
            self._finished.add(number)
        while self._live in self._waiting:
            self._write(self._waiting.pop(self._live))
            if self._live not in self._finished:
                break
            if self._several:
                self._end_line()
            self._live += 1

    def close(self) -> None:
        """Writes what is held back of later sequences (after an interruption) and ends the line."""
        self._end_line()
        for number in sorted(self._waiting):
            self._live = number
            self._write(self._waiting.pop(number))
            self._end_line()

    def _end_line(self) -> None:
        """On a terminal, and wherever a label follows or went before."""
        self.out.write(self._flow.finish())
        if not self._column_zero and (self._several or self.out.out.terminal):
            self.out.write("\n")
            self._column_zero = True

    def _write(self, parts: list[tuple[str, str]]) -> None:
        if self._several and self._headed != self._live:
            label = self.name(self._live)
            if self.options.batch is not None:  # with the prompt: `0 · What is …`
                from rich.text import Text

                one = self.prompts[self._live // self.samples]
                words = f"ids {', '.join(map(str, one.ids))}" if one.text is None else one.text
                named = Text(f"{label} · {one_line(words)}")
                width = min(self.out.out.width, LABEL_COLUMNS) - len("--- ")
                named.truncate(width, overflow="ellipsis")
                label = named.plain
            self.out.write(f"--- {label}\n")
            self._headed = self._live
            self._column_zero = True
        text = "".join(text for text, _ in parts)
        if not text:
            return
        self._column_zero = text.endswith("\n")
        show = self._flow.painted
        if self.out.out.terminal:
            self.out.fit()  # it may have another width by now
            self._flow.fit(self.out.out.width)
            show = self._flow.push
        self.out.write("".join(show(*part) for part in parts))


class TokenWriter(Presentation):
    """One JSON object a line and a token: {"sequence", "index", "id", "text", "logprob", "ms"}.

    `ms`: the engine's milliseconds so far. A greedy one also has its "margin" and whether it is
    "tied"; with `--logprobs` each has the likeliest tokens, "top". The first line also has the
    model and the environment. Where the template marks reasoning, lines have what is new of the
    "content" and of the "reasoning". The only prompt of a run counts as begun before its first
    token.
    """

    def __post_init__(self) -> None:
        begun = self.samples if len(self.prompts) == 1 else 0
        self._unfinished = dict.fromkeys(range(begun), 0)  # sequence → index of its next token
        self._parts: dict[int, AnswerParts | None] = {}
        self._ms = 0.0
        self._first = True

    def token(self, number: int, token: Token) -> None:
        """Writes the line at once; the last of a sequence also has its `finish_reason`."""
        more: dict[str, Any] = {}
        if number not in self._parts:
            self._parts[number] = self.parts(number // self.samples)
        if (parts := self._parts[number]) is not None:
            new = parts.push(token.text)
            rest = Answer("", "") if token.finish is None else parts.finish()
            more["content"] = new.content + rest.content
            more["reasoning"] = new.reasoning + rest.reasoning
        if token.tied is not None:
            more |= {"margin": token.margin, "tied": token.tied}
        if self.options.logprobs is not None:
            more["top"] = self.alternatives(token)
        self._ms = round(self.run.watch.elapsed * 1000, 3)
        self._unfinished[number] = token.index + 1
        if token.finish is not None:
            more["finish_reason"] = token.finish
            del self._unfinished[number]
        line = {"sequence": number, "index": token.index, "id": token.id, "text": token.text}
        self._write(line | {"logprob": token.logprob, "ms": self._ms, **more})

    def close(self) -> None:
        """A last line, without a token, for every sequence that was interrupted."""
        for number, index in sorted(self._unfinished.items()):
            line = {"sequence": number, "index": index, "id": None, "text": "", "logprob": None}
            self._write(line | {"ms": self._ms, "finish_reason": "interrupted"})

    def _write(self, line: Mapping[str, Any]) -> None:
        self.out.write(dumps({**line, **(self.header if self._first else {})}) + "\n")
        self._first = False


class DocumentWriter(Presentation):
    """A JSON document of each prompt, once its sequences have all ended, in the prompts' order.

    At `close`, sequences that have begun and not ended are written as they are, marked
    `interrupted`; the only prompt of a run counts as begun.
    """

    def __post_init__(self) -> None:
        self._taken: list[list[list[Token]]] = [
            [[] for _ in range(self.samples)] for _ in self.prompts
        ]
        self._next = 0  # the prompt whose document is written next

    def token(self, number: int, token: Token) -> None:
        """Adds the token; writes the documents that are complete with it."""
        prompt, sample = divmod(number, self.samples)
        self._taken[prompt][sample].append(token)  # at once: all of it or nothing if interrupted
        while self._next < len(self._taken) and all(
            tokens and tokens[-1].finish for tokens in self._taken[self._next]
        ):
            self._document(self._next)
            self._next += 1
            self._taken[self._next - 1].clear()

    def close(self) -> None:
        """Writes the documents of prompts that have begun."""
        for prompt, taken in enumerate(self._taken[self._next :], self._next):
            if len(self._taken) == 1 or any(taken):
                self._document(prompt)

    def _output(self, index: int, tokens: Sequence[Token]) -> Generated:
        """One text of a prompt, of the tokens that there are."""
        output = Generated(text="".join(one.text for one in tokens), ids=[one.id for one in tokens])
        tied = [one.tied for one in tokens if one.tied is not None]
        output.tied_tokens = sum(tied) if tied else None
        if tokens and tokens[-1].finish:
            output.finish_reason = tokens[-1].finish
        if self.options.logprobs is not None:
            output.logprobs = [
                TokenLogprob(
                    id=one.id,
                    text=self.run.model.token_text(one.id),
                    logprob=one.logprob,
                    top=self.alternatives(one),
                    margin=one.margin,
                    tied=one.tied,
                )
                for one in tokens
            ]
        if (parts := self.parts(index)) is not None:
            begun, rest = parts.push(output.text), parts.finish()
            output.content = begun.content + rest.content
            output.reasoning = (begun.reasoning + rest.reasoning).rstrip()
        return output

    def _document(self, index: int) -> None:
        """One prompt's JSON document; a batch has one a line, with its `index`."""
        outputs = [self._output(index, tokens) for tokens in self._taken[index]]
        report = self.report(index)
        # an interruption may have come between the count of a token and its arrival here
        timings = replace(report.timings, generated_tokens=sum(len(one.ids) for one in outputs))
        batch = self.options.batch is not None
        body: dict[str, Any] = {"index": index} if batch else {}
        body |= {"prompt": self.prompts[index], "outputs": outputs}
        report = replace(report, timings=timings)
        self.out.document({**body, **members(report)}, **self.header, lines=batch)
