"""The grid of the logit lens: a line for each row, a column for each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from llmcli.commands.lens.report import LensCell, LensReport
from llmcli.ui.cells import Ink, fitted
from llmcli.ui.layout import WIDEST, Dotted
from llmcli.ui.stats import confidence_legend
from llmcli.ui.theme import FAINT, HEADING, NUMBER, confidence_style
from llmcli.ui.token_text import in_cell, short, space

NAME = 10  # columns of a row's name
LEAST, MOST, GAP = 4, 12, 2  # columns of a cell, and those between two
SHARE = 4  # more of them where there is no colour: the probability in percent


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

    Colours say how probable a token is; where there are none, a number does.
    """

    report: LensReport
    ranks: bool
    whole: str  # what has all positions, to be said where some are left out

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, ink = self.report, Ink.of(console, options)
        lines = [[self._cell(cell, ink) for cell in row.cells] for row in report.rows]
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
        for row, cells in zip(report.rows, lines, strict=True):
            yield frame.cells(short(row.name), cells)
        yield frame.rule()
        yield frame.words("settled", settled)
        if len(frame.shown) < len(report.tokens):
            yield Dotted(_left_out(report, frame.shown, self.whole), FAINT)

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
        parts = ["the likeliest next token as every layer leaves it"]
        if self.ranks:
            parts = [f"rank of {report.target} as every layer leaves it (1: likeliest)"]
        if ink.kind == "shades":
            parts.append(f"with its probability{'' if self.ranks else ' in percent'}")
        if not self.ranks:
            parts.append(f"{space(ink)} is a space")
        if report.from_prompt < len(report.positions):
            parts.append(f"{_bar(ink)} from position {report.prompt_tokens} on the model wrote it")
        yield Dotted(parts, FAINT)
        if ink.kind != "shades":
            yield confidence_legend()
        settled = "settled: from this layer on the output's token is the likeliest in all of them"
        yield Text(settled, style=FAINT)


def _left_out(report: LensReport, shown: range, whole: str) -> list[str]:
    """Which positions are here, and how to see others."""
    first, last = report.positions[shown.start], report.positions[shown.stop - 1]
    count = len(report.tokens)
    others = f":{first}" if first else f"{last + 1}:"
    return [
        f"positions {first} to {last} of {count} tokens",
        f"others with --position, such as {others}",
        *filter(None, [whole]),
    ]


def _bar(ink: Ink) -> str:
    return "|" if ink.ascii else "│"


def _line(text: Text) -> Text:
    text.rstrip()
    text.no_wrap, text.overflow = True, "ignore"
    return text
