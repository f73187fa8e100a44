"""The logit lens in the terminal: layers × positions, or one position with everything about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.render.cells import Ink, fitted
from llmcli.render.checks import render_checks
from llmcli.render.layout import Column, Dotted, Rows
from llmcli.render.stats import confidence_legend
from llmcli.render.theme import FAINT, HEADING, NUMBER, confidence_style, one_line, quoted
from llmcli.render.tokens import percent
from llmcli.reports.lens import LensCell, LensReport, LensRow

WIDEST = 240  # columns: where nothing else bounds it, such as in a pipe
NAME = 10  # columns of a row's name
LEAST, MOST, GAP = 4, 12, 2  # columns of a cell, and those between two
SHARE = 4  # more of them where there is no colour: the probability in percent
BAR = 10

BASIS = (
    "Early layers do not yet write in the basis that the output is read in: their tokens say less "
    "about them than those of the last layers do (Belrose et al. 2023)."
)


def render_lens(report: LensReport, title: str, *, ranks: bool = False) -> RenderableType:
    """The grid, or the table of a single position, what its words mean, and the checks.

    `title` is the model's line. A cell of the grid has its likeliest token, or with `ranks` the
    rank of the target.
    """
    one = len(report.positions) == 1
    return Group(
        Text(one_line(title), style=HEADING),
        *(_position(report) if one else (Grid(report, ranks), Legend(report, ranks))),
        Text(BASIS, style=FAINT),
        render_checks(report.checks),
    )


def room(columns: int) -> int:
    """How many positions a grid of that width can have at most."""
    return max(1, (min(columns, WIDEST) - NAME) // (LEAST + GAP))


@dataclass(frozen=True)
class _Cell:
    text: str
    probability: float


@dataclass(frozen=True)
class _Frame:
    """Which columns are shown, how wide each is, and with what."""

    ink: Ink
    widths: Sequence[int]
    shown: range

    @classmethod
    def of(cls, columns: Sequence[Sequence[str]], ink: Ink, width: int) -> _Frame:
        """As many of the last columns as fit `width`, at least one."""
        share = 0 if ink.kind != "shades" else SHARE
        widths = [share + min(MOST, max([LEAST, *map(cell_len, column)])) for column in columns]
        first, used = len(widths), NAME - GAP
        while first and used + GAP + widths[first - 1] <= width:
            first -= 1
            used += GAP + widths[first]
        return cls(ink, widths, range(min(first, len(widths) - 1), len(widths)))

    @property
    def colours(self) -> bool:
        """Whether there are any."""
        return self.ink.kind != "shades"

    def words(self, name: str, words: Sequence[str], style: str = FAINT) -> Text:
        """A line of words, one for every column there is."""
        line = Text().append(f"{name:<{NAME - GAP}}", style=FAINT)
        for at in self.shown:
            text = fitted(words[at], self.widths[at], self.ink)
            line.append(" " * GAP).append(text, style=style)
        return _line(line)

    def cells(self, name: str, cells: Sequence[_Cell]) -> Text:
        """A line of cells: coloured by their probability, or with a number behind them."""
        line = Text().append(f"{name:<{NAME - GAP}}", style=FAINT)
        for at in self.shown:
            cell, width = cells[at], self.widths[at]
            style = confidence_style(cell.probability) if self.colours else ""
            share = "" if self.colours else f"{100 * cell.probability:>{SHARE}.0f}"
            text = fitted(cell.text, width - len(share), self.ink)
            line.append(" " * GAP).append(text + share, style=style)
        return _line(line)

    def rule(self) -> Text:
        """A line as long as the others."""
        length = NAME - GAP + sum(GAP + self.widths[at] for at in self.shown)
        return _line(Text("─" * length, style=FAINT))


@dataclass(frozen=True)
class Grid:
    """A line for each row, a column for each position: as many of the last ones as fit.

    Colours say how probable a token is; where there are none, a number in percent does.
    """

    report: LensReport
    ranks: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, ink = self.report, Ink.of(console, options)
        lines = [[self._cell(cell, ink) for cell in row.cells] for row in report.rows]
        tokens = [_text(*report.tokens[position], ink) for position in report.positions]
        targets = [_text(t.id, t.text, ink) for t in report.targets] if self.ranks else []
        settled = [short(report.rows[row]) for row in report.settled]
        words = [[cell.text for cell in cells] for cells in lines] + [tokens, settled]
        columns = list(zip(*words, *([targets] if targets else []), strict=True))
        frame = _Frame.of(columns, ink, min(options.max_width, WIDEST))
        yield frame.words("position", [str(position) for position in report.positions])
        yield frame.words("token", tokens, HEADING)
        if targets:
            yield frame.words("target", targets, NUMBER)
        yield frame.rule()
        for row, cells in zip(report.rows, lines, strict=True):
            yield frame.cells(short(row), cells)
        yield frame.rule()
        yield frame.words("settled", settled)
        if len(frame.shown) < len(report.tokens):
            yield Dotted(_left_out(report, frame.shown), FAINT)

    def _cell(self, cell: LensCell, ink: Ink) -> _Cell:
        if self.ranks:
            return _Cell(str(cell.target_rank), cell.target_probability)
        first = cell.top[0]
        return _Cell(_text(first.id, first.text, ink), first.probability)


@dataclass(frozen=True)
class Legend:
    """What a cell, its colour or its number, and the last line mean."""

    report: LensReport
    ranks: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ink = Ink.of(console, options)
        parts = ["the likeliest next token as every layer leaves it"]
        if self.ranks:
            parts = [f"rank of {self.report.target} as every layer leaves it (1: likeliest)"]
        if ink.kind == "shades":
            parts.append("with its probability in percent")
        if not self.ranks:
            parts.append(f"{_space(ink)} is a space")
        yield Dotted(parts, FAINT)
        if ink.kind != "shades":
            yield confidence_legend()
        settled = "settled: from here on down the output's token is the likeliest"
        yield Text(settled, style=FAINT)


def _position(report: LensReport) -> Iterator[RenderableType]:
    """One position: a line a row with the target's rank, entropy, divergence, other tokens."""
    at, target = report.positions[0], report.targets[0]
    here = _name(*report.tokens[at])
    parts = [f"position {at} of {len(report.tokens)}: after {here}"]
    best = report.rows[-1].cells[0].top[0]
    parts.append(f"output {_name(best.id, best.text)} {percent(best.probability)}")
    if target.id != best.id:
        parts.append(f"target {_name(target.id, target.text)} {percent(target.probability)}")
    parts.append(f"settled at {short(report.rows[report.settled[0]])}")
    yield Dotted(parts)
    most = math.log(max(2, report.vocabulary))
    columns = [
        Column("layer", right=False), Column("token", right=False, cut=True),
        Column("prob", first_to_go=1), Column("rank"),
        Column("entropy", first_to_go=2), Column("", right=False, first_to_go=4),
        Column("KL"), Column("", right=False, first_to_go=3),
        Column("then", right=False, cut=True, first_to_go=5),
    ]  # fmt: skip
    yield Rows(columns, [_row(row, most) for row in report.rows])
    words = [
        f"rank of {_name(target.id, target.text)}, {report.target}",
        "entropy and KL(output ‖ layer) in nats",
        f"bars end at ln {report.vocabulary} = {most:.2f}, the entropy of knowing nothing",
    ]
    yield Dotted(words, FAINT)


def _row(row: LensRow, most: float) -> list[Text]:
    cell = row.cells[0]
    first, *others = cell.top
    token = Text(_name(first.id, first.text), style=confidence_style(first.probability))
    then = "  ".join(f"{_name(o.id, o.text)} {percent(o.probability)}" for o in others)
    words = (percent(first.probability), str(cell.target_rank))
    numbers = [_measured(cell, key, most) for key in ("entropy", "kl")]
    return [
        Text(short(row), style=FAINT), token, *map(Text, words),
        *(text for pair in numbers for text in pair), Text(then, style=FAINT),
    ]  # fmt: skip


def _measured(cell: LensCell, key: Literal["entropy", "kl"], most: float) -> tuple[Text, Text]:
    value = cell.entropy if key == "entropy" else cell.kl
    bar = "█" * round(BAR * min(1.0, value / most))
    return Text(f"{value:.2f}"), Text(bar, style=NUMBER)


def short(row: LensRow) -> str:
    """`embed`, `3 mid` for the stream before that layer's feed-forward part, `3` after it."""
    if row.layer is None:
        return "embed"
    return f"{row.layer} mid" if row.name.endswith("resid_mid") else str(row.layer)


def _text(id: int, text: str, ink: Ink) -> str:
    """A token in a cell: without quotes, its spaces visible; the id where it has no text."""
    shown = quoted(text)[1:-1].replace(" ", _space(ink)) or str(id)
    return shown.encode("ascii", "backslashreplace").decode() if ink.ascii else shown


def _space(ink: Ink) -> str:
    return "_" if ink.ascii else "␣"


def _name(id: int, text: str) -> str:
    return quoted(text) if text else f"id {id}"


def _left_out(report: LensReport, shown: range) -> list[str]:
    """Which positions are here, and how to see others."""
    first, last = report.positions[shown.start], report.positions[shown.stop - 1]
    count = len(report.tokens)
    others = f":{first}" if first else f"{last + 1}:"
    return [
        f"positions {first} to {last} of {count} tokens",
        f"others with --position, such as {others}",
        "--json and -o have all",
    ]


def _line(text: Text) -> Text:
    text.rstrip()
    text.no_wrap, text.overflow = True, "ignore"
    return text
