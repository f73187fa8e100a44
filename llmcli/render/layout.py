"""Rows and lists that fit themselves into the width they are given, numbers always whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from llmcli.render.theme import FAINT, HEADING

SEPARATOR = " · "
GAP = "   "
LEAST = 8  # columns that a cell which may be cut keeps


def filled(parts: Sequence[str], width: int) -> list[str]:
    """`parts` joined by dots into as few lines as fit `width`, never cut inside a part."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(SEPARATOR) + len(part) <= width:
            lines[-1] += SEPARATOR + part
        else:
            lines.append(part)
    return lines


@dataclass(frozen=True)
class Dotted:
    """Parts joined by dots; lines break between them."""

    parts: Sequence[str]
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(filled(self.parts, options.max_width)), style=self.style)


@dataclass(frozen=True)
class Column:
    """`cut`: cells may be shortened with …; where that is too little, columns are left out.

    Those with the largest `first_to_go` go first; 0 stays.
    """

    name: str
    right: bool = True
    cut: bool = False
    first_to_go: int = 0


@dataclass(frozen=True)
class Rows:
    """A table with one line a row. Where even the least does not fit, the lines are too long.

    `gap`: (first, end, words) of rows that are left out, and the line in their place.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]
    gap: tuple[int, int, str] = (0, 0, "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, end, words = self.gap
        rows = [*self.rows[:first], *self.rows[end:]]
        kept, widths = self._fitted(rows, options.max_width)
        yield self._line([Text(c.name, style=HEADING) for c in self.columns], kept, widths)
        yield _uncut(Text("─" * (sum(widths) + len(GAP) * (len(kept) - 1)), style=FAINT))
        for number, row in enumerate(rows):
            if words and number == first:
                yield _uncut(Text(words, style=FAINT))
            yield self._line(row, kept, widths)

    def hidden(self, width: int) -> tuple[str, ...]:
        """The names of the columns that are left out where there are `width` columns."""
        kept, _ = self._fitted(self.rows, width)
        return tuple(
            column.name for index, column in enumerate(self.columns) if index not in kept
        )

    def _fitted(self, rows: Sequence[Sequence[Text]], width: int) -> tuple[list[int], list[int]]:
        """The columns to show and their widths, in `width` columns where that can be."""
        natural = [
            max([cell_len(column.name), *(row[index].cell_len for row in rows)])
            for index, column in enumerate(self.columns)
        ]
        least = [min(n, LEAST) if c.cut else n for c, n in zip(self.columns, natural, strict=True)]
        kept = list(range(len(self.columns)))
        turns = sorted({column.first_to_go for column in self.columns} - {0}, reverse=True)
        for turn in turns:
            if _total(least, kept) > width:
                kept = [index for index in kept if self.columns[index].first_to_go != turn]
        over = max(0, _total(natural, kept) - width)
        return kept, [max(least[index], natural[index] - over) for index in kept]

    def _line(self, cells: Sequence[Text], kept: Sequence[int], widths: Sequence[int]) -> Text:
        parts = []
        for index, width in zip(kept, widths, strict=True):
            cell = cells[index].copy()
            cell.truncate(width, overflow="ellipsis")
            cell.align("right" if self.columns[index].right else "left", width)
            parts.append(cell)
        line = Text(GAP).join(parts)
        line.rstrip()
        return _uncut(line)


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[index] for index in kept) + len(GAP) * (len(kept) - 1)


def _uncut(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ignore"
    return line
