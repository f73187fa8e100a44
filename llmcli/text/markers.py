"""Markers of reasoning and tool calls in answers.

Models delimit these parts with trained marker texts. Each row is one format; a model uses the
formats whose signs occur in its chat template. Sources: the templates published with Qwen 3,
DeepSeek R1, SmolLM3, GLM 4.5, MiniMax M2, Magistral, Seed-OSS, EXAONE Deep, Kimi, Granite 3.2,
Command R7B, Gemma 4 and gpt-oss (OpenAI, "Harmony response format").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

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
            "<|start|>assistant", "<|channel|>commentary<|message|>", "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>", "<|end|>",
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
)  # fmt: skip


@dataclass(frozen=True)
class Markers:
    """The formats of one chat template."""

    formats: tuple[Format, ...] = ()

    @classmethod
    def of(cls, source: str) -> Markers:
        """The formats whose signs occur in a template's source."""
        return cls(tuple(one for one in FORMATS if any(sign in source for sign in one.signs)))

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer | None) -> Markers:
        """The formats of the tokenizer's chat template; empty without one."""
        template = None if tokenizer is None else tokenizer.chat_template
        return cls() if template is None else cls.of(template.source)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all formats."""
        return tuple(part for one in self.formats for part in one.parts)

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """Markers without a part."""
        return tuple(text for one in self.formats for text in one.ignored)

    @property
    def reasoning(self) -> bool:
        """Whether a format marks reasoning."""
        return any(part.kind == "reasoning" for part in self.parts)

    @property
    def apart(self) -> bool:
        """Whether the template takes only the content of past answers."""
        return any(one.apart for one in self.formats)

    def special_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids of special tokens in markers, which must be shown in the text."""
        texts = [*self.ignored, *(text for part in self.parts for text in (part.open, part.close))]
        found = ((one, tokenizer.token_text(one)) for one in tokenizer.special_ids if texts)
        return frozenset(one for one, own in found if own and any(own in text for text in texts))
