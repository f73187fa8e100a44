"""The names of a model's tensors, one below the other, with what each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.shapes.report import LetterValue, NameRow
from llmcli.commands.shapes.view.screen import Indented, listed, sizes_of_letters
from llmcli.ui.layout import GAP, Dotted
from llmcli.ui.theme import FAINT, HEADING, NUMBER, one_line

_WHAT = ("what it is", "its formula", "what others call it: {i} is a layer's number")


def render_names(
    rows: Sequence[NameRow], letters: Sequence[LetterValue], title: str, *, example: bool = False
) -> RenderableType:
    """Each name with its axes and their sizes, those of the papers, what it is, its aliases.

    `example`: the number of tokens is nobody's.
    """
    parts: list[RenderableType] = [
        Text(one_line(title), style=HEADING),
        *sizes_of_letters(letters, example),
        Text(),
        Text("name   [letters] = [sizes]   the papers' letters", style=HEADING),
        Indented(Dotted(_WHAT, HEADING)),
    ]
    for row in rows:
        lines = [row.words, row.formula] if row.kind != "state" else [row.formula]
        axes = f"{listed(row.axes)} = {listed(row.shape)}"
        parts += [Text(), Named(row.name, (axes, " × ".join(row.documents)))]
        parts.append(Indented(Dotted(lines)))
        if row.aliases:
            parts.append(Indented(Dotted([one_line(alias) for alias in row.aliases], FAINT)))
    return Group(*parts)


@dataclass(frozen=True)
class Named:
    """A name and what stands behind it, below it where the line is too short."""

    name: str
    facts: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        facts = GAP.join(self.facts)
        if cell_len(self.name + GAP + facts) <= options.max_width:
            yield Text.assemble((self.name, HEADING), GAP, (facts, NUMBER))
        else:
            yield Text(self.name, style=HEADING)
            yield Indented(Dotted(self.facts, NUMBER))
