"""The markers of reasoning and tool calls in answers.

Models mark these parts with texts that they were trained to write. Which ones is data, a row for
each way, and a model uses those that its chat template speaks of. Sources: the templates published
with Qwen 3, DeepSeek R1, SmolLM3, GLM 4.5, MiniMax M2, Magistral, Seed-OSS, EXAONE Deep, Kimi,
Granite 3.2, Command R7B, Gemma 4 and gpt-oss (OpenAI, "Harmony response format").
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
    """What `open` begins and `close` ends; an empty `close`: it goes on to the end."""

    kind: Kind
    open: str
    close: str


@dataclass(frozen=True)
class Format:
    """One way to mark parts, of templates with one of `signs` in their source.

    `ignored` are markers that begin nothing. `apart`: of an answer of the past the template takes
    the content alone, and writes the markers around it; else it takes what was written.
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
            Part("tool", "<|channel|>analysis to=", "<|call|>"),  # of the tools built in
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
        """Those that a template of this source speaks of."""
        return cls(tuple(one for one in FORMATS if any(sign in source for sign in one.signs)))

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer | None) -> Markers:
        """Those that its chat template speaks of; none without one."""
        template = None if tokenizer is None else tokenizer.chat_template
        return cls() if template is None else cls.of(template.source)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What they mark."""
        return tuple(part for one in self.formats for part in one.parts)

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """Markers that begin nothing."""
        return tuple(text for one in self.formats for text in one.ignored)

    @property
    def reasoning(self) -> bool:
        """Whether they mark reasoning."""
        return any(part.kind == "reasoning" for part in self.parts)

    @property
    def apart(self) -> bool:
        """Whether the template takes the content of an answer alone."""
        return any(one.apart for one in self.formats)

    def special_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids of the special tokens that markers are made of, which a text is to show."""
        texts = [*self.ignored, *(text for part in self.parts for text in (part.open, part.close))]
        found = ((one, tokenizer.token_text(one)) for one in tokenizer.special_ids if texts)
        return frozenset(one for one, own in found if own and any(own in text for text in texts))
