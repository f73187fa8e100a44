"""How generated tokens reach stdout: as text while they come, as JSON, or as a line a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from llmcli.records.text import Alternative, Generated, TokenLogprob
from llmcli.shell.output import Output, colour_system, dumps
from llmcli.text.segments import Answer, AnswerParts
from llmcli.ui.theme import confidence_style, printable

if TYPE_CHECKING:
    from llmcli.engine.output import Token
    from llmcli.text import Tokenizer


class Writer(Protocol):
    """Takes the tokens of numbered sequences as they come, interleaved."""

    def token(self, number: int, token: Token, ms: float) -> None:
        """One token of sequence `number`, `ms` milliseconds after the first prompt was begun."""

    def close(self) -> None:
        """No more tokens come: the end, or an interruption."""


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
        self._waiting.setdefault(number, []).append(self._shown(token))
        if token.finish is not None:
            self._finished.add(number)
        while self._live in self._waiting:
            self._write(self._waiting.pop(self._live))
            if self._live not in self._finished:
                break
            self._end_sequence()
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

    def _shown(self, token: Token) -> tuple[str, str]:
        text = f"{token.id} " if self._ids_only else token.text
        if self._out.out.terminal:
            text = printable(text)
        if not self._colour or token.logprob is None:
            return text, ""
        tied = " underline" if token.tied else ""
        return text, f"{confidence_style(math.exp(token.logprob))}{tied}"

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

    def _end_sequence(self) -> None:
        if self._labels is not None:
            self._end_line()


class TokenWriter:
    """One JSON object a line and a token: {"sequence", "index", "id", "text", "logprob", "ms"}.

    A greedy one also has its "margin" and whether it is "tied".

    `top`: each line also has the likeliest tokens. `begun`: sequences that count as begun before
    their first token comes. The first line also has `header`, the model and the environment.
    `parts` is what takes apart the text of a sequence (None: nothing does); its lines then also
    have what is new of the "content" and of the "reasoning".
    """

    def __init__(
        self, out: Output, *, tokenizer: Tokenizer | None, top: bool, begun: int,
        header: Mapping[str, Any], parts: Callable[[int], AnswerParts | None],
    ) -> None:  # fmt: skip
        self._out = out
        self._header = header
        self._tokenizer = tokenizer
        self._top = top
        self._parts = cache(parts)
        self._unfinished = dict.fromkeys(range(begun), 0)  # sequence → index of its next token
        self._ms = 0.0

    def token(self, number: int, token: Token, ms: float) -> None:
        """Writes the line at once; the last of a sequence also has its `finish_reason`."""
        line = self._line(number, token.index, ms, token.id, token.text, token.logprob)
        if (parts := self._parts(number)) is not None:
            new = parts.push(token.text)
            rest = Answer("", "") if token.finish is None else parts.finish()
            line["content"] = new.content + rest.content
            line["reasoning"] = new.reasoning + rest.reasoning
        if token.tied is not None:
            line |= {"margin": token.margin, "tied": token.tied}
        if self._top:
            line["top"] = _alternatives(token, self._tokenizer)
        self._ms = ms
        self._unfinished[number] = token.index + 1
        if token.finish is not None:
            line["finish_reason"] = token.finish
            del self._unfinished[number]
        self._write(line)

    def close(self) -> None:
        """A last line, without a token, for every sequence that was interrupted."""
        for number, index in sorted(self._unfinished.items()):
            line = self._line(number, index, self._ms, None, "", None)
            self._write(line | {"finish_reason": "interrupted"})
        self._unfinished.clear()

    @staticmethod
    def _line(
        number: int, index: int, ms: float, id: int | None, text: str, logprob: float | None
    ) -> dict[str, Any]:
        return {
            "sequence": number, "index": index, "id": id, "text": text, "logprob": logprob,
            "ms": round(ms, 3),
        }  # fmt: skip

    def _write(self, line: Mapping[str, Any]) -> None:
        header, self._header = self._header, {}
        self._out.write(dumps({**line, **header}) + "\n")


class Collector:
    """Keeps the sequences as reports, and calls `ready(prompt, outputs)` in prompt order.

    `samples` sequences belong to each of `prompts` prompts. At `close`, sequences that have
    begun and not ended are delivered as they are, marked `interrupted`.
    """

    def __init__(
        self,
        ready: Callable[[int, list[Generated]], None],
        *,
        prompts: int,
        samples: int,
        tokenizer: Tokenizer | None,
        logprobs: bool,
    ) -> None:
        self._ready = ready
        self._samples = samples
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._outputs: dict[int, Generated] = {}
        self._unfinished = [samples] * prompts
        self._next = 0  # the prompt whose sequences are delivered next

    def token(self, number: int, token: Token, ms: float) -> None:
        """Adds the token; delivers prompts whose sequences have all ended."""
        output = self._output(number)
        output.ids.append(token.id)
        output.text += token.text
        if token.tied is not None:
            output.tied_tokens = (output.tied_tokens or 0) + token.tied
        if output.logprobs is not None:
            output.logprobs.append(self._logprob(token))
        if token.finish is not None:
            output.finish_reason = token.finish
            self._unfinished[number // self._samples] -= 1
        while self._next < len(self._unfinished) and not self._unfinished[self._next]:
            self._deliver()

    def close(self) -> None:
        """Delivers what has begun; the only prompt of a run counts as begun."""
        while self._next < len(self._unfinished):
            begun = any(number in self._outputs for number in self._numbers())
            if begun or len(self._unfinished) == 1:
                self._deliver()
            else:
                self._next += 1

    def _numbers(self) -> range:
        return range(self._next * self._samples, (self._next + 1) * self._samples)

    def _deliver(self) -> None:
        self._ready(self._next, [self._output(number) for number in self._numbers()])
        self._next += 1

    def _output(self, number: int) -> Generated:
        if number not in self._outputs:
            self._outputs[number] = Generated(logprobs=[] if self._logprobs else None)
        return self._outputs[number]

    def _logprob(self, token: Token) -> TokenLogprob:
        return TokenLogprob(
            id=token.id,
            text=_text(token.id, self._tokenizer),
            logprob=token.logprob,
            top=_alternatives(token, self._tokenizer),
            margin=token.margin,
            tied=token.tied,
        )


def _alternatives(token: Token, tokenizer: Tokenizer | None) -> tuple[Alternative, ...]:
    return tuple(
        Alternative(id=id, text=_text(id, tokenizer), logprob=logprob) for id, logprob in token.top
    )


def _text(id: int, tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else tokenizer.token_text(id)
