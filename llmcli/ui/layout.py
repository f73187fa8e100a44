"""Lines, tables and checks that fit themselves into the width they are given, numbers whole."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from unicodedata import bidirectional

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from llmcli.records.document import ViewCheck
from llmcli.records.numbers import counted
from llmcli.records.text import Token
from llmcli.ui.theme import FAINT, HEADING, SPACE, markdown_cell, one_line, quoted

if TYPE_CHECKING:
    from llmcli.ui.palette import Ink

SEPARATOR = " · "
GAP = "   "
INDENT = "    "
LEAST = 8  # columns that a cell which may be cut keeps
_GLUE = "\udfff"  # between a number and its unit while lines are broken; text shown never has it
WIDEST = 240  # columns of pictures and lists where nothing else bounds them, such as in a pipe
GOOD, BAD = "✓", "✗"
_MARKS = {GOOD: "ok", BAD: "FAIL"}  # where the terminal has ASCII alone
WRONG = "bold red"


def filled(
    parts: Sequence[str],
    width: float,
    between: str = SEPARATOR,
    measure: Callable[[str], float] = len,
) -> list[str]:
    """`parts` joined into as few lines as fit `width`, never cut inside a part."""
    lines: list[str] = []
    for part in parts:
        if lines and measure(longer := f"{lines[-1]}{between}{part}") <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


@dataclass(frozen=True)
class Line:
    """Parts joined by dots, or what is `between` them; lines break there.

    A part that is too long breaks between words, but a number stays with its unit.
    """

    parts: Sequence[str]
    style: str = ""
    between: str = SEPARATOR

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = "\n".join(filled(self.parts, options.max_width, self.between))
        glued = Text(re.sub(r"(?<=\d) (?=[%kMGTmB])", _GLUE, lines))
        for line in glued.wrap(console, options.max_width):
            words = line.plain.replace(_GLUE, " ")
            yield Text(words, style=self.style, no_wrap=True, overflow="ignore")


@dataclass(frozen=True)
class Indented:
    """A block `by` columns from the left, fewer where that leaves it less than 28."""

    block: RenderableType
    by: int = len(INDENT)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        by = min(self.by, max(0, options.max_width - 28))
        inner = options.update(width=options.max_width - by)
        for line in Segment.split_lines(console.render(self.block, inner)):
            yield Segment(" " * by)
            yield from line
            yield Segment.line()


@dataclass(frozen=True)
class Column:
    """`cut`: cells may be shortened with …; where that is too little, columns are left out.

    Those with the largest `drop` go first; 0 stays. `labelled`: with its name where it is
    on a line below; not `below`: it has no place there.
    """

    name: str
    right: bool = True
    cut: bool = False
    drop: int = 0
    labelled: bool = False
    below: bool = True


@dataclass(frozen=True)
class Rows:
    """A table with one line a row. Where even the least does not fit, the lines are too long.

    A cell without a style may be a `str`: a text of millions of tokens has as many rows.
    `gap`: (first, end, words) of rows that are left out, and the line in their place. `below`:
    what is in columns that are left out stands below its row, four columns to the right.
    `markdown`: with the bars of a Markdown table, each in the middle of a gap.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text | str]]
    gap: tuple[int, int, str] = (0, 0, "")
    below: bool = False
    markdown: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, _, words = self.gap
        kept, widths = self._fitted(options.max_width - len("|  |") * self.markdown)
        heads = [Text(c.name, style=HEADING) for c in self.columns]
        yield from self._line(heads, kept, widths, console)
        yield from self._lines_below(heads, kept, head=True)
        if self.markdown:
            ends = ("-:"[self.columns[index].right] for index in kept)
            rules = (f"{end:->{width}}" for end, width in zip(ends, widths, strict=True))
            rule = f"| {' | '.join(rules)} |"
        else:
            rule = "─" * (sum(widths) + len(GAP) * (len(kept) - 1))
        yield Text(rule, FAINT, no_wrap=True, overflow="ignore")
        for number, row in enumerate(self._shown):
            if words and number == first:
                yield Text(words, FAINT, no_wrap=True, overflow="ignore")
            yield from self._line(row, kept, widths, console)
            yield from self._lines_below(row, kept)

    def fit(self, width: int) -> bool:
        """Whether every column has room in `width`."""
        kept, widths = self._fitted(width)
        return len(kept) == len(self.columns) and _total(widths, kept) <= width

    @property
    def _shown(self) -> Sequence[Sequence[Text | str]]:
        first, end, words = self.gap
        return [*self.rows[:first], *self.rows[end:]] if words else self.rows

    def _lines_below(
        self, cells: Sequence[Text | str], kept: Sequence[int], *, head: bool = False
    ) -> Iterator[Indented]:
        """The lines below a row with what has no column."""
        if not self.below:
            return
        parts = [
            f"{column.name} {cell}" if column.labelled and not head else str(cell)
            for index, (column, cell) in enumerate(zip(self.columns, cells, strict=True))
            if index not in kept and column.below and cell
        ]
        if parts:
            yield Indented(Line(parts, FAINT))

    def _fitted(self, width: int) -> tuple[list[int], list[int]]:
        """The columns to show and their widths, in `width` columns where that can be."""
        natural = [cell_len(column.name) for column in self.columns]
        for row in self._shown:
            natural = [max(n, _width(cell)) for n, cell in zip(natural, row, strict=True)]
        least = [min(n, LEAST) if c.cut else n for c, n in zip(self.columns, natural, strict=True)]
        kept = list(range(len(self.columns)))
        turns = sorted({column.drop for column in self.columns} - {0}, reverse=True)
        for turn in turns:
            if _total(least, kept) > width:
                kept = [index for index in kept if self.columns[index].drop != turn]
        over = max(0, _total(natural, kept) - width)
        return kept, [max(least[index], natural[index] - over) for index in kept]

    def _line(
        self,
        cells: Sequence[Text | str],
        kept: Sequence[int],
        widths: Sequence[int],
        console: Console,
    ) -> Iterator[Segment]:
        """The row in as few segments as it has styles: a `Text` of its own for each costs most."""
        segments: list[Segment] = []
        gap = " | " if self.markdown else GAP
        plain = "| " * self.markdown  # what has come since the last style
        for position, (index, width) in enumerate(zip(kept, widths, strict=True)):
            cell, right = cells[index], self.columns[index].right
            plain += gap if position else ""
            used = _width(cell)
            if used > width:
                cell = Text(cell) if isinstance(cell, str) else cell.copy()
                cell.truncate(width, overflow="ellipsis")
                used = cell.cell_len
            spaces = " " * (width - used)
            plain += spaces if right else ""
            if isinstance(cell, str):
                plain += cell
            else:
                whole = Text().join([cell])  # so that its own style is a span, too
                segments += [Segment(plain), *whole.render(console)]
                plain = ""
            plain += "" if right else spaces
        segments.append(Segment(plain + " |" * self.markdown))
        while segments and not (last := segments[-1]).text.rstrip():
            segments.pop()
        if segments:
            segments[-1] = Segment(last.text.rstrip(), last.style)
        yield from segments
        yield Segment.line()


Item = TypeVar("Item")


def table(
    items: Iterable[Item],
    columns: Sequence[tuple[Column, Callable[[Item], Text | str]]],
    *,
    below: bool = False,
    markdown: bool = False,
) -> Rows:
    """A row for each item; a column comes with what makes its cells; the rest as in `Rows`."""
    rows = [[cell(item) for _, cell in columns] for item in items]
    if markdown:
        rows = [[markdown_cell(str(shown)) for shown in row] for row in rows]
    return Rows([column for column, _ in columns], rows, below=below, markdown=markdown)


def _width(cell: Text | str) -> int:
    text = str(cell)
    return len(text) if text.isascii() else cell_len(text)


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[index] for index in kept) + len(GAP) * (len(kept) - 1)


def fitted(text: str, width: int, ink: Ink) -> str:
    """`text` in exactly `width` columns, cut with … where it is longer.

    Letters that are written from right to left are followed by a mark that is not seen, so that
    what comes after them stays in its place. Where the terminal lacks signs they are spelled.
    """
    if ink.ascii:
        text = text.encode("ascii", "backslashreplace").decode("ascii")
    if cell_len(text) > width:
        text = cut(text, width - 1) + ("~" if ink.ascii else "…")
    gap = " " * (width - cell_len(text))
    leftward = any(bidirectional(character) in ("R", "AL", "AN") for character in text)
    return text + "\u200e" * leftward + gap


def cut(text: str, width: int) -> str:
    """As much of the beginning as fits: a wide character that does not is left out."""
    while text and cell_len(text) > width:
        text = text[:-1]
    return text


def in_cell(token: Token, ink: Ink) -> str:
    """A token in a cell: without quotes, its spaces visible; the id where it has no text."""
    shown = quoted(token.text)[1:-1].replace(" ", space(ink)) or str(token.id)
    return shown.encode("ascii", "backslashreplace").decode() if ink.ascii else shown


def space(ink: Ink) -> str:
    """The sign for a space."""
    return "_" if ink.ascii else SPACE


def in_words(token: Token) -> str:
    """A token in a sentence: quoted, or its id."""
    return quoted(token.text) if token.text else f"id {token.id}"


def render_checks(
    checks: Sequence[ViewCheck], *, full: bool = True, option: str = "--checks"
) -> RenderableType:
    """A line for each check, with the place of the worst difference where one fails.

    Not `full`: one line for all that pass, and the `option` that shows them, if there is one.
    """
    wrong = [check for check in checks if not check.ok]
    if full or not checks:
        return Group(*(_check_line(check) for check in checks))
    passed = len(checks) - len(wrong)
    count = SEPARATOR.join(filter(None, (counted(passed, "check"), option)))
    lines = [Marked(GOOD, count, FAINT)] if passed else []
    return Group(*(_check_line(check) for check in wrong), *lines)


def _check_line(check: ViewCheck) -> RenderableType:
    parts = [f"{'' if check.ok else 'check failed: '}{one_line(check.words)}", _apart(check)]
    if check.ok:
        return Marked(GOOD, SEPARATOR.join(filter(None, parts)), FAINT)
    if check.where:
        parts.append(f"worst at {one_line(check.where)}")
    return Marked(BAD, SEPARATOR.join(parts), WRONG)


@dataclass(frozen=True)
class Marked:
    """A mark, and a text whose further lines begin below its first word."""

    mark: str
    text: str
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        mark = _MARKS.get(self.mark, self.mark) if options.ascii_only else self.mark
        indent = len(mark) + 1
        lines = Text(self.text).wrap(console, max(8, options.max_width - indent))
        joined = Text("\n" + " " * indent).join(Text(line.plain.rstrip()) for line in lines)
        yield Text.assemble(f"{mark} ", joined, style=self.style)


def _apart(check: ViewCheck) -> str:
    """How far it is off and what is allowed; empty for the 0 of a check that allows only 0."""
    if math.isnan(check.value):
        return "nan"
    if check.tolerance == 0:
        return "" if check.ok else f"{check.value:.2g} (must be 0)"
    return f"{check.value:.2g} of {check.tolerance:.2g} allowed"
