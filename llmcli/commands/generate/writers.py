"""How generated tokens reach stdout: as text while they come, as JSON, or as a line a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from llmcli.commands.generate.measure import Run
from llmcli.commands.generate.report import ComputePath, RunReport, SamplingReport
from llmcli.errors import LlmcliError
from llmcli.measure.environment import environment
from llmcli.records.document import members
from llmcli.records.text import Alternative, Generated, TokenLogprob
from llmcli.shell.exits import SIGNALS, Stopped
from llmcli.shell.output import Output, colour_system, dumps
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import Prompt
from llmcli.shell.running import kernels_of
from llmcli.shell.sampling import Resolved
from llmcli.text.markers import Markers
from llmcli.text.segments import Answer, AnswerParts
from llmcli.ui.theme import confidence_style, one_line, printable

if TYPE_CHECKING:
    from llmcli.commands.generate.command import GenerateOptions, Level
    from llmcli.engine.output import Token

MARKER = 32  # tokens at the end of a prompt, in which it may begin the reasoning
LABEL_COLUMNS = 72  # of the line before each text of a batch


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """Everything is loaded, read and checked; `write` generates and writes.

    `level`: how much is said on stderr. `drawn`: the seed was drawn for this run.
    """

    out: Output
    options: GenerateOptions
    prompts: Sequence[Prompt]
    resolved: Resolved
    run: Run
    level: Level
    drawn: bool

    def write(self) -> None:
        """Generates and writes. An interruption keeps what there is and raises Stopped."""
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
            raise Stopped(stop, reported=True, where=where) from stop
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

    def _writer(self) -> TextWriter | TokenWriter | DocumentWriter:
        """The writer for the options; it is closed after the last token or an interruption.

        It takes the tokens of numbered sequences as they come, interleaved, each with the engine's
        milliseconds so far.
        """
        samples, prompts = self.run.request.samples, len(self.prompts)
        token_text, logprobs = self.run.model.token_text, self.options.logprobs is not None
        if self.options.stream_json:
            return TokenWriter(
                self.out, token_text, top=logprobs, begun=samples if prompts == 1 else 0,
                header=self._header, parts=lambda number: self._parts(number // samples),
            )  # fmt: skip
        if self.out.json:
            outputs = [
                [Generated(logprobs=[] if logprobs else None) for _ in range(samples)]
                for _ in range(prompts)
            ]
            return DocumentWriter(self._document, outputs, token_text)
        colour = logprobs and self.out.out.colour
        if logprobs and not colour:
            self.out.note("`--logprobs` shows colours, which are off here: --json has the numbers")
        labels = None
        if self.options.batch is not None or samples > 1:
            labels = [self._label(number) for number in range(prompts * samples)]
        ids_only = self.run.model.tokenizer is None
        return TextWriter(self.out, labels=labels, colour=colour, ids_only=ids_only)

    @cached_property
    def _header(self) -> Mapping[str, Any]:
        """The model and the environment, as documents have them."""
        model = self.run.model.describe()
        return {"model": model, "environment": environment(kernels=kernels_of(model))}

    def _parts(self, index: int) -> AnswerParts | None:
        """Splits the answer to this prompt; None if its template marks no reasoning."""
        tokenizer, prompt = self.run.model.tokenizer, self.prompts[index]
        markers = Markers.of_tokenizer(tokenizer)
        if tokenizer is None or not (prompt.chat and markers.reasoning):
            return None
        return AnswerParts(markers, tokenizer.decode(prompt.ids[-MARKER:], skip_special=False))

    def _number(self, number: int) -> str:
        """`1` for a sample or a prompt of a batch, `0.1` for its samples, empty for one text."""
        samples = self.run.request.samples
        prompt, sample = divmod(number, samples)
        named = [prompt] * (self.options.batch is not None) + [sample] * (samples > 1)
        return ".".join(map(str, named))

    def _label(self, number: int) -> str:
        """`_number`, with the prompt where there are several: `0 · What is …`."""
        if self.options.batch is None:
            return self._number(number)
        from rich.text import Text

        given = self.prompts[number // self.run.request.samples]
        words = given.text if given.text is not None else f"ids {', '.join(map(str, given.ids))}"
        label = Text(f"{self._number(number)} · {one_line(words)}")
        label.truncate(min(self.out.out.width, LABEL_COLUMNS) - len("--- "), overflow="ellipsis")
        return label.plain

    def _document(self, index: int, outputs: list[Generated]) -> None:
        """One prompt's JSON document; a batch has one a line, with its `index`."""
        for output in outputs:
            if (parts := self._parts(index)) is not None:
                begun, rest = parts.push(output.text), parts.finish()
                output.content = begun.content + rest.content
                output.reasoning = (begun.reasoning + rest.reasoning).rstrip()
        batch = self.options.batch is not None
        body: dict[str, Any] = {"index": index} if batch else {}
        body |= {"prompt": self.prompts[index], "outputs": outputs, **members(self._report(index))}
        self.out.document(body, **self._header, lines=batch)

    def _statistics(self) -> None:
        """Speed, memory and settings on stderr, and what the colours mean."""
        if self.level == "off":
            return
        from llmcli.commands.generate.view import TEMPLATE, full_stats, short_stats
        from llmcli.ui.facts import confidence_legend

        out, run, report = self.out, self.run, self._report()
        text = not (out.json or self.options.stream_json)
        if text and self.options.logprobs is not None and out.out.colour:
            out.aside(confidence_legend(ties=self.resolved.greedy))
        watched = out.out.terminal and out.err.terminal and not out.quiet
        if text and watched and any(one.chat and not one.messages for one in self.prompts):
            out.aside(TEMPLATE)
        if self.level == "short":
            full = "context full" if run.full else ""
            ended = f"-n {run.request.limit}" if run.limited else full
            out.aside(short_stats(report, ended, out.err.width))
            return
        ties = [
            (run.model.token_text(token.id) or str(token.id), token.index, self._number(number))
            for number, token in run.ties
        ]
        out.aside(full_stats(report, ties, **self._header))

    def _report(self, index: int | None = None) -> RunReport:
        """How the texts of one prompt were generated; without an `index`, of all prompts."""
        run, resolved, request = self.run, self.resolved, self.run.request
        values: Mapping[str, Any] = resolved.values
        return RunReport(
            sampling=SamplingReport(
                **values, seed=request.sampling.seed, greedy=resolved.greedy,
                max_tokens=-1 if request.limit is None else request.limit,
                stop=tuple(request.stop), origins=resolved.origins, ignored=resolved.ignored,
            ),
            path=ComputePath(
                **run.model.arithmetic.describe(run.model.config),
                kernels=self._header["environment"].kernels,
                sequences=max(run.side_by_side) if index is None else run.side_by_side[index],
            ),
            timings=run.watch.timings(None if index is None else run.tallies[index]),
            speculation=None if run.speculation is None else run.speculation.describe(),
        )  # fmt: skip


class TextWriter:
    """The text of each sequence, one after the other; the first unfinished one is live.

    With `labels`, a line `--- label` goes before each sequence. With `colour`, each token's
    text has the colour of its probability, and near ties are underlined. On a terminal lines break
    between words, control characters are spelled out and the cursor ends on a new line.
    """

    def __init__(
        self, out: Output, *, labels: Sequence[str] | None, colour: bool, ids_only: bool
    ) -> None:
        from llmcli.ui.flow import Flow, FlowingText

        self._out = out
        self._labels = labels
        self._colour = colour
        self._ids_only = ids_only
        self._flow = Flow(out.out.width, colour=colour, system=colour_system())
        self._text = FlowingText(self._flow)
        self._live = 0
        self._waiting: dict[int, list[tuple[str, str]]] = {}  # texts and their styles
        self._finished: set[int] = set()
        self._headed = -1
        self._column_zero = True

    def token(self, number: int, token: Token, ms: float) -> None:
        """Writes the token, or keeps it until the sequences before it are finished."""
        text, style = f"{token.id} " if self._ids_only else token.text, ""
        if self._out.out.terminal:
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
            if self._labels is not None:
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
        self._out.write(self._text.finish())
        if not self._column_zero and (self._labels is not None or self._out.out.terminal):
            self._out.write("\n")
            self._column_zero = True

    def _write(self, parts: list[tuple[str, str]]) -> None:
        if self._labels is not None and self._headed != self._live:
            self._out.write(f"--- {self._labels[self._live]}\n")
            self._headed = self._live
            self._column_zero = True
        text = "".join(text for text, _ in parts)
        if not text:
            return
        self._column_zero = text.endswith("\n")
        show = self._flow.painted
        if self._out.out.terminal:
            self._out.fit()  # it may have another width by now
            self._flow.fit(self._out.out.width)
            show = self._text.push
        self._out.write("".join(show(*part) for part in parts))


class TokenWriter:
    """One JSON object a line and a token: {"sequence", "index", "id", "text", "logprob", "ms"}.

    A greedy one also has its "margin" and whether it is "tied".

    `top`: each line also has the likeliest tokens. `begun`: sequences that count as begun before
    their first token comes. The first line also has `header`, the model and the environment.
    `parts(number)` splits the text of a sequence (None: does not); its lines then also have what
    is new of the "content" and of the "reasoning".
    """

    def __init__(
        self, out: Output, token_text: Callable[[int], str], *, top: bool, begun: int,
        header: Mapping[str, Any], parts: Callable[[int], AnswerParts | None],
    ) -> None:  # fmt: skip
        self._out = out
        self._token_text = token_text
        self._top = top
        self._header = header
        self._parts = cache(parts)
        self._unfinished = dict.fromkeys(range(begun), 0)  # sequence → index of its next token
        self._ms = 0.0

    def token(self, number: int, token: Token, ms: float) -> None:
        """Writes the line at once; the last of a sequence also has its `finish_reason`."""
        more: dict[str, Any] = {}
        if (parts := self._parts(number)) is not None:
            new = parts.push(token.text)
            rest = Answer("", "") if token.finish is None else parts.finish()
            more["content"] = new.content + rest.content
            more["reasoning"] = new.reasoning + rest.reasoning
        if token.tied is not None:
            more |= {"margin": token.margin, "tied": token.tied}
        if self._top:
            more["top"] = _alternatives(token, self._token_text)
        self._ms = round(ms, 3)
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
        header, self._header = self._header, {}
        self._out.write(dumps({**line, **header}) + "\n")


class DocumentWriter:
    """Adds tokens to the `outputs` of each prompt, and calls `ready(prompt, outputs)` in order.

    At `close`, sequences that have begun and not ended are delivered as they are, marked
    `interrupted`.
    """

    def __init__(
        self, ready: Callable[[int, list[Generated]], None], outputs: Sequence[list[Generated]],
        token_text: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._ready = ready
        self._token_text = token_text
        self._outputs = outputs
        self._next = 0  # the prompt whose sequences are delivered next

    def token(self, number: int, token: Token, ms: float) -> None:
        """Adds the token; delivers prompts whose sequences have all ended."""
        prompt, sample = divmod(number, len(self._outputs[0]))
        output = self._outputs[prompt][sample]
        output.ids.append(token.id)
        output.text += token.text
        if token.tied is not None:
            output.tied_tokens = (output.tied_tokens or 0) + token.tied
        if output.logprobs is not None:
            output.logprobs.append(TokenLogprob(
                id=token.id, text=self._token_text(token.id), logprob=token.logprob,
                top=_alternatives(token, self._token_text), margin=token.margin, tied=token.tied,
            ))  # fmt: skip
        output.finish_reason = token.finish or output.finish_reason
        while self._next < len(self._outputs) and not any(
            one.finish_reason == "interrupted" for one in self._outputs[self._next]
        ):
            self._ready(self._next, self._outputs[self._next])
            self._next += 1

    def close(self) -> None:
        """Delivers what has begun; the only prompt of a run counts as begun."""
        for prompt, outputs in enumerate(self._outputs[self._next :], self._next):
            if len(self._outputs) == 1 or any(one.ids for one in outputs):
                self._ready(prompt, outputs)


def _alternatives(token: Token, token_text: Callable[[int], str]) -> tuple[Alternative, ...]:
    return tuple(
        Alternative(id=id, text=token_text(id), logprob=logprob) for id, logprob in token.top
    )
