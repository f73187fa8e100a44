"""Rows and lists that fit themselves into the width they are given, numbers always whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from llmcli.render.theme import FAINT, HEADING

SEPARATOR = " · "
GAP = "   "
INDENT = "    "
LEAST = 8  # columns that a cell which may be cut keeps
WIDEST = 240  # columns of pictures and lists where nothing else bounds them, such as in a pipe


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

    Those with the largest `first_to_go` go first; 0 stays. `labelled`: with its name where it is
    on a line below.
    """

    name: str
    right: bool = True
    cut: bool = False
    first_to_go: int = 0
    labelled: bool = False


@dataclass(frozen=True)
class Rows:
    """A table with one line a row. Where even the least does not fit, the lines are too long.

    `gap`: (first, end, words) of rows that are left out, and the line in their place. `spill`:
    what is in columns that are left out stands below its row, four columns to the right.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]
    gap: tuple[int, int, str] = (0, 0, "")
    spill: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, end, words = self.gap
        rows = [*self.rows[:first], *self.rows[end:]]
        kept, widths = self._fitted(rows, options.max_width)
        heads = [Text(c.name, style=HEADING) for c in self.columns]
        yield self._line(heads, kept, widths)
        yield from self._spilled(heads, kept, options.max_width, head=True)
        yield _uncut(Text("─" * (sum(widths) + len(GAP) * (len(kept) - 1)), style=FAINT))
        for number, row in enumerate(rows):
            if words and number == first:
                yield _uncut(Text(words, style=FAINT))
            yield self._line(row, kept, widths)
            yield from self._spilled(row, kept, options.max_width)

    def fit(self, width: int) -> bool:
        """Whether every column has room in `width`."""
        first, end, _ = self.gap
        return len(self._fitted([*self.rows[:first], *self.rows[end:]], width)[0]) == len(
            self.columns
        )

    def _spilled(
        self, cells: Sequence[Text], kept: Sequence[int], width: int, *, head: bool = False
    ) -> Iterator[Text]:
        """The lines below a row with what has no column."""
        parts = [
            f"{column.name} {cell.plain}" if column.labelled and not head else cell.plain
            for index, (column, cell) in enumerate(zip(self.columns, cells, strict=True))
            if self.spill and index not in kept and cell.plain
        ]
        for line in filled(parts, max(1, width - len(INDENT))):
            yield Text(INDENT + line, style=FAINT)

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
