"""Splits a streamed answer into reasoning, tool calls and text by the model's markers.

Models delimit these parts with trained marker texts. Each row of `FORMATS` is one format; a model
uses the formats whose signs occur in its chat template. Sources: the templates published with
Qwen 3, DeepSeek R1, SmolLM3, GLM 4.5, MiniMax M2, Magistral, Seed-OSS, EXAONE Deep, Kimi,
Granite 3.2, Command R7B, Gemma 4 and gpt-oss (OpenAI, "Harmony response format").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from llmcli.text.tokenizer import Tokenizer

Kind = Literal["text", "reasoning", "tool"]


@dataclass(frozen=True)
class Part:
    """A part from `open` to `close`; with an empty `close` to the end."""

    kind: Kind
    open: str
    close: str


@dataclass(frozen=True)
class Format:
    """A marker format, used by templates whose source contains one of `signs`.

    `ignored`: markers without a part. `apart`: the template takes only the content of past answers
    and writes the markers itself; otherwise it takes the whole answer.
    """

    signs: tuple[str, ...]
    parts: tuple[Part, ...]
    ignored: tuple[str, ...] = ()
    apart: bool = False


def _thought(open: str, close: str) -> Format:
    return Format((open, close), (Part("reasoning", open, close),))


def _tool(open: str, close: str) -> Format:
    return Format((open,), (Part("tool", open, close),))


FORMATS = (
    _thought("<think>", "</think>"),
    _thought("[THINK]", "[/THINK]"),
    _thought("<seed:think>", "</seed:think>"),
    _thought("<thought>", "</thought>"),
    _thought("◁think▷", "◁/think▷"),
    _thought("Here is my thought process:", "Here is my response:"),
    Format(("<|channel>", "<channel|>"), (Part("reasoning", "<|channel>thought\n", "<channel|>"),)),
    Format(
        ("<|START_THINKING|>",),
        (
            Part("reasoning", "<|START_THINKING|>", "<|END_THINKING|>"),
            Part("tool", "<|START_ACTION|>", "<|END_ACTION|>"),
        ),
        ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        apart=True,
    ),
    Format(
        ("<|channel|>analysis<|message|>",),
        (
            Part("reasoning", "<|channel|>analysis<|message|>", "<|end|>"),
            Part("tool", "<|channel|>commentary to=", "<|call|>"),
            Part("tool", "<|channel|>analysis to=", "<|call|>"),  # built-in tools
            Part("tool", "<|start|>assistant to=", "<|call|>"),
        ),
        ignored=(
            "<|start|>assistant",
            "<|channel|>commentary<|message|>",
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|end|>",
        ),
        apart=True,
    ),
    _tool("<tool_call>", "</tool_call>"),
    _tool("<seed:tool_call>", "</seed:tool_call>"),
    _tool("<minimax:tool_call>", "</minimax:tool_call>"),
    _tool("<|tool_call>", "<tool_call|>"),
    _tool("<|tool_call|>", ""),
    _tool("[TOOL_CALLS]", ""),
    _tool("<|python_tag|>", ""),
)


@dataclass(frozen=True)
class Markers:
    """The parts and ignored markers of one chat template's formats.

    `apart`: the template takes only the content of past answers.
    """

    parts: tuple[Part, ...] = ()
    ignored: tuple[str, ...] = ()
    apart: bool = False

    @classmethod
    def of(cls, source: str) -> Markers:
        """The markers of the formats whose signs occur in a template's source."""
        formats = [one for one in FORMATS if any(sign in source for sign in one.signs)]
        return cls(
            parts=tuple(part for one in formats for part in one.parts),
            ignored=tuple(text for one in formats for text in one.ignored),
            apart=any(one.apart for one in formats),
        )

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer | None) -> Markers:
        """The markers of the tokenizer's chat template; empty without one."""
        template = None if tokenizer is None else tokenizer.chat_template
        return cls() if template is None else cls.of(template.source)

    @property
    def reasoning(self) -> bool:
        """Whether a format marks reasoning."""
        return any(part.kind == "reasoning" for part in self.parts)

    def special_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids of special tokens in markers."""
        texts = [*self.ignored, *(text for part in self.parts for text in (part.open, part.close))]
        found = ((one, tokenizer.token_text(one)) for one in tokenizer.special_ids if texts)
        return frozenset(one for one, own in found if own and any(own in text for text in texts))


class Segment(NamedTuple):
    """A piece of an answer. `marker`: it is a marker (with the whitespace after it)."""

    kind: Kind
    text: str
    marker: bool = False


@dataclass(frozen=True)
class Answer:
    """A whole answer: the content (tool calls included), and the reasoning."""

    content: str
    reasoning: str


class Segmenter:
    """Splits a growing answer into segments, whose concatenation is its text.

    A possible beginning of a marker is held back. `prompt`: the text before the answer, which may
    already have begun a part. Reasoning only begins directly after the last marker, since an answer
    may mention `<think>`.
    """

    def __init__(self, markers: Markers, prompt: str = "") -> None:
        self._markers = markers
        self._held = ""
        end = prompt.rstrip()
        self._part = next(
            (part for part in markers.parts if end.endswith(part.open.rstrip())), None
        )
        # whether only whitespace has come since the last marker, and whether it belongs to it
        self._blank = bool(markers.parts)
        self._strip = markers.reasoning

    def push(self, text: str) -> list[Segment]:
        """Add text; returns the segments that are certain."""
        self._held += text
        return self._taken(end=False)

    def finish(self) -> list[Segment]:
        """End the answer; returns the text held back."""
        return self._taken(end=True)

    def _taken(self, *, end: bool) -> list[Segment]:
        found: list[Segment] = []
        while text := self._held:
            if self._blank and (spaces := len(text) - len(text.lstrip())):
                self._take(found, spaces, marker=self._strip, blank=True)
                continue
            marks = self._marks()
            unsure = len(text) if end else begun(text, marks)
            found_at = ((text.find(mark), -len(mark), mark) for mark in marks)
            places = [place for place in found_at if 0 <= place[0] < unsure]
            begin, _, mark = min(places, default=(unsure, 0, ""))  # the longest of the first ones
            if begin:
                self._take(found, 1 if self._blank else begin)
            elif mark:
                begins = marks[mark]
                self._part = begins or self._part
                self._strip = self._part is None or self._part.kind != "tool"
                self._take(found, len(mark), marker=True, blank=True)
                self._part = begins
            else:
                break
        return found

    def _marks(self) -> dict[str, Part | None]:
        """The markers that apply in the current state, with the parts that they begin."""
        if self._part is not None:
            return {self._part.close: None} if self._part.close else {}
        parts = reversed(self._markers.parts)  # of equal markers the first counts
        opened = {one.open: one for one in parts if self._blank or one.kind != "reasoning"}
        return dict.fromkeys(self._markers.ignored) | opened

    def _take(
        self, found: list[Segment], count: int, *, marker: bool = False, blank: bool = False
    ) -> None:
        kind = "text" if self._part is None else self._part.kind
        found.append(Segment(kind, self._held[:count], marker))
        self._held = self._held[count:]
        self._blank = blank


class AnswerParts:
    """Content and reasoning of a growing answer: both methods return the new text of each.

    Runs of the same kind become paragraphs.
    """

    def __init__(self, markers: Markers, prompt: str = "") -> None:
        self._segmenter = Segmenter(markers, prompt)
        self._last: dict[Kind, str] = {"text": "", "reasoning": ""}
        self._begins = False  # whether a new run begins

    def push(self, text: str) -> Answer:
        """Add text; returns the new content and reasoning."""
        return self._new(self._segmenter.push(text))

    def finish(self) -> Answer:
        """End the answer; returns the text held back."""
        return self._new(self._segmenter.finish())

    def _new(self, segments: Iterable[Segment]) -> Answer:
        new: dict[Kind, str] = {"text": "", "reasoning": ""}
        for kind, own, marker in segments:
            if marker and kind != "tool":
                self._begins = True
                continue
            to: Kind = "reasoning" if kind == "reasoning" else "text"
            new[to] += gap(self._last[to]) * self._begins + own
            self._last[to], self._begins = own[-1:], False
        return Answer(new["text"], new["reasoning"])


def whole_answer(markers: Markers, text: str, prompt: str = "") -> Answer:
    """Split a whole answer to `prompt`."""
    parts = AnswerParts(markers, prompt)
    begun, rest = parts.push(text), parts.finish()
    return Answer(begun.content + rest.content, (begun.reasoning + rest.reasoning).rstrip())


def gap(before: str) -> str:
    """The separator between a text and the next paragraph."""
    return ("\n" if before.endswith("\n") else "\n\n") if before else ""


def begun(text: str, marks: Iterable[str]) -> int:
    """Start of the longest suffix of `text` that is a prefix of one of `marks`.

    The length of `text` if there is none.
    """
    at = len(text)
    for mark in marks:
        for length in range(min(len(text), len(mark) - 1), len(text) - at, -1):
            if mark.startswith(text[-length:]):
                at = len(text) - length
                break
    return at
