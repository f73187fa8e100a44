"""Tables of Markdown, drawn where every row has as many cells as the header: no text is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from llmcli.ui.emphasis import Emphasis
from llmcli.ui.theme import FAINT, HEADING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_BORDER = re.compile(r"(?<!\\)\|")
_RULE = re.compile(r":?-+:?")
_LEAST = 2 + 3  # columns of the narrowest cell, which a wide character fits into, and its border


def drawn_table(rows: Sequence[str], console: Console) -> str | None:
    """The table that these lines are, each of which begins with `|`, as wide as `console` at most.

    None where they are none, or one that cannot be drawn as it stands: rows differ in their number
    of cells, or the terminal is too narrow for so many.
    """
    cells = [_cells(row) for row in rows]
    count = len(cells[0])
    if (
        len(rows) < 2 or any(len(row) != count for row in cells)
        or not all(map(_RULE.fullmatch, cells[1])) or count * _LEAST > console.width
    ):  # fmt: skip
        return None
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE, border_style=FAINT, header_style=HEADING, show_edge=False, pad_edge=False
    )
    colour = not console.no_color
    for title, rule in zip(cells[0], cells[1], strict=True):
        table.add_column(_text(title, colour), justify=_side(rule), overflow="fold")
    for row in cells[2:]:
        table.add_row(*(_text(cell, colour) for cell in row))
    with console.capture() as drawn:
        console.print(table, crop=False)
    return "".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines())


def _cells(row: str) -> list[str]:
    """The texts between the borders; a `|` behind a backslash is text, and the last is optional."""
    found = [cell.strip() for cell in _BORDER.split(row)][1:]
    return found if found[-1] else found[:-1] or found


def _side(rule: str) -> Literal["left", "center", "right"]:
    if not rule.endswith(":"):
        return "left"
    return "center" if rule.startswith(":") else "right"


class _Cell:
    """What the emphasis of a cell is added to."""

    def __init__(self, *, colour: bool) -> None:
        from rich.text import Text

        self.colour = colour
        self.text = Text()

    def add(self, text: str, style: str = "") -> str:
        self.text.append(text, style)
        return ""


def _text(cell: str, colour: bool) -> Text:
    """Without colours it keeps its markers, as all text does."""
    shown = _Cell(colour=colour)
    Emphasis(shown).push(cell.replace(r"\|", "|") if colour else cell, end=True)
    return shown.text
