"""The logit lens in the terminal: layers × positions, or one position in detail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import ne

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.lens.report import LensCell, LensReport, LensRow
from llmcli.commands.lens.view.position import Position, headline
from llmcli.ui.cells import Ink, fitted
from llmcli.ui.layout import WIDEST, Dotted
from llmcli.ui.stats import confidence_legend
from llmcli.ui.theme import FAINT, HEADING, NUMBER, confidence_style, one_line
from llmcli.ui.token_text import in_cell, short, space

NAME = 10  # columns of a row's name
LEAST, MOST, GAP = 4, 12, 2  # columns of a cell, and those between two
# lines of the screen beside the rows, the checks and the prompt of the shell included
AROUND_GRID, AROUND_POSITION, LEAST_ROWS = 13, 12, 4
SHARE = 4  # more of them where there is no colour: the probability in percent


def render_lens(
    report: LensReport, title: str, *, ranks: bool = False, height: int | None = None,
    whole: str = "",
) -> RenderableType:  # fmt: skip
    """The grid, or the table of a single position, and what its words mean.

    `title` is the model's line. A cell of the grid has its likeliest token, or with `ranks` the
    rank of the target. `height`: of the screen in lines, where only as many layers as fit are
    shown. `whole` names the option that shows what is left out.
    """
    heading = Text(one_line(title), style=HEADING)
    if len(report.positions) == 1:
        rows = some_rows(report.rows, None if height is None else height - AROUND_POSITION)
        table = Position(report, rows, spill=height is None)
        return Group(heading, headline(report), table, *_others(report, len(rows), whole))
    return Group(heading, Grid(report, ranks, height, whole), Legend(report, ranks))


def some_rows(rows: Sequence[LensRow], most: int | None) -> Sequence[LensRow]:
    """At most so many, the first and the last always; None: all.

    Then those where the likeliest token changes. Where these are too many, or all of them are here
    and there is room for more, evenly spread, of each part the one where most of them change.
    """
    if most is None or len(rows) <= (most := max(most, LEAST_ROWS)):
        return rows
    best = [[cell.top[0].id for cell in row.cells] for row in rows]
    changes = [0, *(sum(map(ne, *pair)) for pair in pairwise(best))]
    between = range(1, len(rows) - 1)
    kept = {0, len(rows) - 1, *(at for at in between if changes[at])}
    if len(kept) > most:
        kept = {0, len(rows) - 1}
    rest = [at for at in between if at not in kept]
    parts = most - len(kept)
    for n in range(parts):
        part = rest[n * len(rest) // parts : (n + 1) * len(rest) // parts]
        kept.add(max(part, key=lambda at: (changes[at], -abs(at - part[len(part) // 2]))))
    return [rows[at] for at in sorted(kept)]


def room(columns: int) -> int:
    """How many positions a grid of that width can have at most."""
    return max(1, (min(columns, WIDEST) - NAME) // (LEAST + GAP))


@dataclass(frozen=True)
class _Cell:
    text: str
    probability: float


@dataclass(frozen=True)
class _Frame:
    """Which columns are shown, how wide each is, and with what.

    `written` is the first of the columns whose token the model wrote, if there is one. `share`:
    the columns at the end of a cell that have its probability.
    """

    ink: Ink
    widths: Sequence[int]
    shown: range
    written: int
    share: int

    @classmethod
    def of(
        cls, columns: Sequence[Sequence[str]], ink: Ink, width: int, *, written: int, share: int
    ) -> _Frame:
        """As many of the last columns as fit `width`, at least one."""
        widths = [share + min(MOST, max([LEAST, *map(cell_len, column)])) for column in columns]
        first, used = len(widths), NAME - GAP
        while first and used + GAP + widths[first - 1] <= width:
            first -= 1
            used += GAP + widths[first]
        shown = range(min(first, len(widths) - 1), len(widths))
        return cls(ink, widths, shown, written, share)

    def words(self, name: str, words: Sequence[str], style: str = FAINT) -> Text:
        """A line of words, one for every column there is."""
        line = self._named(name)
        for at in self.shown:
            self._part(line, at)
            line.append(fitted(words[at], self.widths[at], self.ink), style=style)
        return _line(line)

    def cells(self, name: str, cells: Sequence[_Cell]) -> Text:
        """A line of cells: coloured by their probability where there are colours."""
        line = self._named(name)
        for at in self.shown:
            cell, width = cells[at], self.widths[at]
            style = "" if self.ink.kind == "shades" else confidence_style(cell.probability)
            share = f"{100 * cell.probability:>{SHARE}.0f}" if self.share else ""
            self._part(line, at)
            line.append(fitted(cell.text, width - len(share), self.ink) + share, style=style)
        return _line(line)

    def rule(self, name: str = "") -> Text:
        """A line as long as the others, with the name of the rows below it."""
        line = self._named(f"{name} " if name else "", "─")
        for at in self.shown:
            cross = "┼" if at == self.written else "─"
            line.append(cross + "─" * (GAP - 1 + self.widths[at]), style=FAINT)
        return _line(line)

    def _named(self, name: str, fill: str = " ") -> Text:
        return Text().append(f"{name:{fill}<{NAME - GAP}}", style=FAINT)

    def _part(self, line: Text, at: int) -> None:
        """What is before a column: a gap, or the line where the model began to write."""
        line.append(f"{_bar(self.ink) if at == self.written else '':<{GAP}}", style=FAINT)


@dataclass(frozen=True)
class Grid:
    """As many of the last positions as fit; a line before those that the model wrote.

    Colours say how probable a token is; where there are none, a number does. Of more layers than
    fit `height` some are shown.
    """

    report: LensReport
    ranks: bool
    height: int | None
    whole: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, ink = self.report, Ink.of(console, options)
        around = AROUND_GRID + self.ranks - (ink.kind == "shades" and not self.ranks)
        rows = some_rows(report.rows, None if self.height is None else self.height - around)
        lines = [[self._cell(cell, ink) for cell in row.cells] for row in rows]
        tokens = [in_cell(*report.tokens[position], ink) for position in report.positions]
        targets = [in_cell(t.id, t.text, ink) for t in report.targets] if self.ranks else []
        settled = [short(name) for name in report.settled]
        words = [[cell.text for cell in cells] for cells in lines] + [tokens, settled]
        columns = list(zip(*words, *([targets] if targets else []), strict=True))
        frame = _Frame.of(
            columns, ink, min(options.max_width, WIDEST), written=report.from_prompt,
            share=SHARE if ink.kind == "shades" and not self.ranks else 0,
        )  # fmt: skip
        yield frame.words("position", [str(position) for position in report.positions])
        yield frame.words("token", tokens, HEADING)
        if targets:
            yield frame.words("target", targets, NUMBER)
        yield frame.rule("layer")
        for row, cells in zip(rows, lines, strict=True):
            yield frame.cells(short(row.name), cells)
        yield frame.rule()
        yield frame.words("settled", settled)
        yield from _others(report, len(rows), self.whole, frame.shown)

    def _cell(self, cell: LensCell, ink: Ink) -> _Cell:
        if self.ranks:
            share = f" ({cell.target_probability:.0%})" if ink.kind == "shades" else ""
            return _Cell(f"{cell.target_rank}{share}", cell.target_probability)
        first = cell.top[0]
        return _Cell(in_cell(first.id, first.text, ink), first.probability)


@dataclass(frozen=True)
class Legend:
    """What a cell, its colour or its number, the line between columns and the last line mean."""

    report: LensReport
    ranks: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, ink = self.report, Ink.of(console, options)
        percent = f" and its probability{'' if self.ranks else ' in %'}"
        what = f"rank of {report.target} (1: likeliest)" if self.ranks else "likeliest next token"
        parts = [f"{what} after each layer{percent if ink.kind == 'shades' else ''}"]
        if not self.ranks:
            parts.append(f"{space(ink)} is a space")
        if report.from_prompt < len(report.positions):
            parts.append(f"{_bar(ink)} from position {report.prompt_tokens} on the model wrote it")
        parts.append("settled: from this layer on the output's token stays likeliest")
        yield Dotted(parts, FAINT)
        if ink.kind != "shades":
            yield confidence_legend()


def _others(
    report: LensReport, rows: int, whole: str, shown: range | None = None
) -> Iterator[RenderableType]:
    """Which positions and how many layers are here, where some are not, and how to see others."""
    parts, more = [], []
    count = len(report.tokens)
    if shown is not None and len(shown) < count:
        first, last = report.positions[shown.start], report.positions[shown.stop - 1]
        parts.append(f"positions {first} to {last} of {count} tokens")
        more.append(f"--position {f':{first}' if first else f'{last + 1}:'}")
    if rows < len(report.rows):
        parts.append(f"{rows} of {len(report.rows)} rows")
        more += filter(None, [whole])
    if parts:
        yield Dotted([*parts, *([f"more: {', '.join(more)}"] if more else [])], FAINT)


def _bar(ink: Ink) -> str:
    return "|" if ink.ascii else "│"


def _line(text: Text) -> Text:
    text.rstrip()
    text.no_wrap, text.overflow = True, "ignore"
    return text
