"""An answer in parts: reasoning, tool calls, and the text that is meant for the reader.

Models mark these parts with texts that they were trained to write. Which ones is data, a row for
each way, and a model uses those that its chat template speaks of. Sources: the templates published
with Qwen 3, DeepSeek R1, SmolLM3, GLM 4.5, MiniMax M2, Magistral, Seed-OSS, EXAONE Deep, Kimi,
Granite 3.2, Command R7B, Gemma 4 and gpt-oss (OpenAI, "Harmony response format").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from llmcli.text.tokenizer import Tokenizer

Kind = Literal["text", "reasoning", "tool"]


class Segment(NamedTuple):
    """A piece of an answer. `marker`: it begins or ends a part (and the whitespace behind it)."""

    kind: Kind
    text: str
    marker: bool = False


@dataclass(frozen=True)
class Part:
    """What `open` begins and `close` ends; an empty `close`: it goes on to the end."""

    kind: Kind
    open: str
    close: str


@dataclass(frozen=True)
class Format:
    """One way to mark parts, of templates with one of `signs` in their source.

    `ignored` are markers that begin nothing. A `key` says that the template takes the answer
    without its reasoning, and that in this key of the message; None: it takes what was written.
    """

    signs: tuple[str, ...]
    parts: tuple[Part, ...]
    ignored: tuple[str, ...] = ()
    key: str | None = None


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
    Format(
        ("<|channel>", "<channel|>"),
        (Part("reasoning", "<|channel>thought\n", "<channel|>"),),
    ),
    Format(
        ("<|START_THINKING|>",),
        (
            Part("reasoning", "<|START_THINKING|>", "<|END_THINKING|>"),
            Part("tool", "<|START_ACTION|>", "<|END_ACTION|>"),
        ),
        ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        key="reasoning_content",
    ),
    Format(
        ("<|channel|>analysis<|message|>",),
        (
            Part("reasoning", "<|channel|>analysis<|message|>", "<|end|>"),
            Part("tool", "<|channel|>commentary to=", "<|call|>"),
            Part("tool", "<|start|>assistant to=", "<|call|>"),
        ),
        ignored=(
            "<|start|>assistant", "<|channel|>commentary<|message|>", "<|channel|>final<|message|>",
            "<|end|>",
        ),
        key="thinking",
    ),
    _tool("<tool_call>", "</tool_call>"),
    _tool("<seed:tool_call>", "</seed:tool_call>"),
    _tool("<minimax:tool_call>", "</minimax:tool_call>"),
    _tool("<|tool_call>", "<tool_call|>"),
    _tool("<|tool_call|>", ""),
    _tool("[TOOL_CALLS]", ""),
    _tool("<|python_tag|>", ""),
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """A whole answer: what is for the reader (tool calls among it), and the reasoning."""

    content: str
    reasoning: str


@dataclass(frozen=True)
class Markers:
    """The formats of one chat template."""

    formats: tuple[Format, ...] = ()
    parts: tuple[Part, ...] = field(init=False)
    ignored: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(p for one in self.formats for p in one.parts))
        object.__setattr__(self, "ignored", tuple(t for one in self.formats for t in one.ignored))

    @classmethod
    def of(cls, source: str) -> Markers:
        """Those that a template of this source speaks of."""
        return cls(tuple(one for one in FORMATS if any(sign in source for sign in one.signs)))

    @property
    def key(self) -> str | None:
        """Where the template takes the reasoning of a message; None: among its content."""
        return next((one.key for one in self.formats if one.key is not None), None)

    def special_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids of the special tokens that markers are made of, which a text is to show."""
        texts = [*self.ignored, *(text for part in self.parts for text in (part.open, part.close))]
        found = ((one, tokenizer.token_text(one)) for one in tokenizer.special_ids if texts)
        return frozenset(one for one, own in found if own and any(own in text for text in texts))

    def answer(self, text: str, prompt: str = "") -> Answer:
        """The parts of a whole answer to this prompt; runs of the same kind are paragraphs."""
        segmenter = Segmenter(self, prompt)
        content = reasoning = ""
        begins = False  # a run
        for kind, own, marker in [*segmenter.push(text), *segmenter.finish()]:
            if marker and kind != "tool":
                begins = True
            elif kind == "reasoning":
                reasoning += gap(reasoning) * begins + own
                begins = False
            else:
                content += gap(content) * begins + own
                begins = False
        return Answer(content, reasoning.rstrip())


class Segmenter:
    """Cuts a growing answer into segments, which joined are its text, however it comes.

    What may be the beginning of a marker is held back. `prompt`: what the answer follows, which
    may have begun a part already. Reasoning begins only where no text precedes it since the last
    marker: an answer may speak of `<think>`.
    """

    def __init__(self, markers: Markers, prompt: str = "") -> None:
        self._markers = markers
        self._held = ""
        end = prompt.rstrip()
        self._part = next(
            (part for part in markers.parts if end.endswith(part.open.rstrip())), None
        )
        # since the last marker nothing but whitespace has come; whether that belongs to it
        self._blank = bool(markers.parts)
        self._strip = any(part.kind == "reasoning" for part in markers.parts)

    def push(self, text: str) -> list[Segment]:
        """The segments that are certain now."""
        self._held += text
        return self._taken(end=False)

    def finish(self) -> list[Segment]:
        """What was held back: the answer is over."""
        return self._taken(end=True)

    @property
    def _kind(self) -> Kind:
        return "text" if self._part is None else self._part.kind

    def _taken(self, *, end: bool) -> list[Segment]:
        found: list[Segment] = []
        while text := self._held:
            if self._blank and (spaces := len(text) - len(text.lstrip())):
                self._take(found, spaces, marker=self._strip, blank=True)
                continue
            marks = self._marks()
            unsure = len(text) if end else begun(text, marks)
            places = [(at, -len(mark)) for mark in marks if 0 <= (at := text.find(mark)) < unsure]
            begin, length = min(places, default=(unsure, 0))
            if begin == 0 and length:
                self._mark(found, text[:-length])
            elif begin == 0:
                break
            else:
                self._take(found, 1 if self._blank else begin)
        return found

    def _marks(self) -> Sequence[str]:
        """The markers that mean something here."""
        if self._part is not None:
            return (self._part.close,) if self._part.close else ()
        parts = self._markers.parts
        opened = (one.open for one in parts if self._blank or one.kind != "reasoning")
        return [*self._markers.ignored, *opened]

    def _mark(self, found: list[Segment], mark: str) -> None:
        """Takes the marker that the text begins with."""
        begins = None
        if self._part is None:
            begins = self._part = next(
                (one for one in self._markers.parts if one.open == mark), None
            )
        self._strip = self._kind != "tool"
        self._take(found, len(mark), marker=True, blank=True)
        self._part = begins

    def _take(
        self, found: list[Segment], count: int, *, marker: bool = False, blank: bool = False
    ) -> None:
        found.append(Segment(self._kind, self._held[:count], marker))
        self._held = self._held[count:]
        self._blank = blank


def gap(before: str) -> str:
    """What is between a text and the paragraph that follows it."""
    return ("\n" if before.endswith("\n") else "\n\n") if before else ""


def begun(text: str, marks: Iterable[str]) -> int:
    """Where the longest end of `text` begins that is the beginning of one of `marks`.

    Its length where there is none.
    """
    at = len(text)
    for mark in marks:
        for length in range(min(len(text), len(mark) - 1), len(text) - at, -1):
            if mark.startswith(text[-length:]):
                at = len(text) - length
                break
    return at
