"""Sentences in the width that there is: numbers stay with their units."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from llmcli.ui.layout import filled

_INDENT = "  "
_LEAST = 8  # columns of a line, however narrow the terminal
_GLUE = "\ue000"  # between a number and its unit while lines are broken


@dataclass(frozen=True)
class Sentence:
    """Words that break between them; further lines begin two columns to the right."""

    words: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _broken(console, self.words, options.max_width - len(_INDENT))
        yield _whole(f"\n{_INDENT}".join(lines), self.style)


@dataclass(frozen=True)
class Dots:
    """Parts joined by dots after an indent; lines break between parts, inside one if they must."""

    parts: Sequence[str]
    style: str = ""
    indent: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(_LEAST, options.max_width - len(self.indent))
        for line in filled(self.parts, room):
            for part in _broken(console, line, room):
                yield _whole(self.indent + part, self.style)


def below(parts: Sequence[str]) -> Dots:
    """Two columns to the right."""
    return Dots(parts, indent=_INDENT)


def _broken(console: Console, words: str, width: int) -> Iterator[str]:
    glued = Text(re.sub(r"(?<=\d) (?=[%kMGTmB])", _GLUE, words))
    for line in glued.wrap(console, max(_LEAST, width)):
        yield line.plain.rstrip().replace(_GLUE, " ")


def _whole(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ignore")
