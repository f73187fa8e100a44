"""One position of the logit lens: a line for each row, with everything that is known of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from llmcli.commands.lens.report import LensReport, LensRow, LensToken, short_name
from llmcli.ui.cells import Ink, fitted, in_words
from llmcli.ui.layout import GAP, Column, Line, Rows
from llmcli.ui.numbers import probability
from llmcli.ui.theme import FAINT, NUMBER, confidence_style

BAR = 10  # columns
OTHER = 16  # columns of a token that is not the likeliest, at most


def headline(report: LensReport) -> Line:
    """Where it is, what the model says there, and since which layer."""
    at, target = report.positions[0], report.targets[0]
    by = "" if at < report.prompt_tokens else ", which the model wrote"
    parts = [f"position {at} of {len(report.tokens)}: after {in_words(report.tokens[at])}{by}"]
    best = report.rows[-1].cells[0].top[0]
    parts.append(f"output {in_words(best)} {probability(best.probability)}")
    if target.id != best.id:
        parts.append(f"target {in_words(target)} {probability(target.probability)}")
    return Line([*parts, f"settled at {short_name(report.settled[0])}"])


def position_table(
    report: LensReport, rows: Sequence[LensRow], below: bool, width: int, ink: Ink
) -> Iterator[RenderableType]:
    """The table of some `rows`: bars where there is room for all.

    `below`: what has no room stands on a second line, else it is left out.
    """
    most = math.log(max(2, report.vocabulary))
    found = [row.cells[0].kl for row in report.rows if math.isfinite(row.cells[0].kl)]
    apart = max(found, default=0.0)
    cells = [_row(row, ink, most, math.log1p(apart)) for row in rows]
    columns = _columns(len(cells[0]))
    bars = _width(columns, cells) <= width
    if not bars:
        kept = [at for at, column in enumerate(columns) if column.name != _NO_NAME]
        columns = [columns[at] for at in kept]
        cells = [[row[at] for at in kept] for row in cells]
    yield Rows(columns, cells, below=below)
    target = report.targets[0]
    words = [
        f"target, rank: probability and rank of {in_words(target)}, "
        f"{report.target}",
        "entropy and KL(output ‖ layer) in nats",
    ]
    if bars:
        words += [
            f"bars: entropy up to ln {report.vocabulary} = {most:.2f}, that of knowing nothing",
            f"KL up to {apart:.2f}, its largest here, as log(1 + KL)",
        ]
    yield Line(words, FAINT)


_NO_NAME = " "  # of a column of bars


def _columns(count: int) -> list[Column]:
    """So many; those beyond the first ones are of other tokens, and the last ones go first."""
    first = [
        Column("layer", right=False), Column("token", right=False, cut=True),
        Column("prob", drop=1, labelled=True),
        Column("target", drop=2, labelled=True), Column("rank"),
        Column("entropy", drop=3, labelled=True), Column(_NO_NAME, right=False),
        Column("KL"), Column(_NO_NAME, right=False),
    ]  # fmt: skip
    others = range(count - len(first))
    return first + [Column("" if n else "then", right=False, drop=4 + n) for n in others]


def _row(row: LensRow, ink: Ink, most: float, apart: float) -> list[Text]:
    cell = row.cells[0]
    first, *others = cell.top
    token = Text(in_words(first), style=confidence_style(first.probability))
    return [
        Text(short_name(row.name), style=FAINT), token, Text(probability(first.probability)),
        Text(probability(cell.target_probability)), Text(str(cell.target_rank)),
        Text(f"{cell.entropy:.2f}"), _bar(cell.entropy, most),
        Text(f"{cell.kl:.2f}"), _bar(math.log1p(cell.kl), apart),
        *(Text(_other(other, ink), style=FAINT) for other in others),
    ]  # fmt: skip


def _bar(value: float, full: float) -> Text:
    length = round(BAR * min(1.0, value / full)) if full > 0 else 0
    return Text("█" * length, style=NUMBER)


def _other(token: LensToken, ink: Ink) -> str:
    """A token, cut where it is long, and its whole probability."""
    words = in_words(token)
    return f"{fitted(words, min(OTHER, cell_len(words)), ink)} {probability(token.probability)}"


def _width(columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> int:
    """Columns of the terminal that the whole table takes."""
    widths = [
        max([cell_len(column.name), *(row[at].cell_len for row in rows)])
        for at, column in enumerate(columns)
    ]
    return sum(widths) + len(GAP) * (len(widths) - 1)
