"""One position of the logit lens: a line for each row, with everything that is known of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from llmcli.commands.lens.report import LensReport, LensRow, LensToken, short_name
from llmcli.ui.layout import Column, Line, Rows, fitted, in_words, table
from llmcli.ui.numbers import probability
from llmcli.ui.palette import Ink
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
    full = math.log(max(2, report.vocabulary))
    found = [row.cells[0].kl for row in report.rows if math.isfinite(row.cells[0].kl)]
    apart = max(found, default=0.0)
    shown = _table(rows, ink, below, (full, math.log1p(apart)))
    bars = shown.fit(width)
    yield shown if bars else _table(rows, ink, below)
    target = report.targets[0]
    words = [
        f"target, rank: probability and rank of {in_words(target)}, "
        f"{report.target}",
        "entropy and KL(output ‖ layer) in nats",
    ]
    if bars:
        words += [
            f"bars: entropy up to ln {report.vocabulary} = {full:.2f}, that of knowing nothing",
            f"KL up to {apart:.2f}, its largest here, as log(1 + KL)",
        ]
    yield Line(words, FAINT)


def _table(
    rows: Sequence[LensRow], ink: Ink, below: bool, full: tuple[float, float] | None = None
) -> Rows:
    """The rows, with bars up to a `full` entropy and log(1 + KL) where these are given."""

    def top(row: LensRow) -> Text:
        first = row.cells[0].top[0]
        return Text(in_words(first), style=confidence_style(first.probability))

    def other(at: int) -> Callable[[LensRow], Text]:
        return lambda row: Text(_other(row.cells[0].top[at], ink), style=FAINT)

    columns: list[tuple[Column, Callable[[LensRow], Text | str]]] = [
        (Column("layer", right=False), lambda row: Text(short_name(row.name), style=FAINT)),
        (Column("token", right=False, cut=full is None), top),
        (Column("prob", drop=1, labelled=True),
         lambda row: probability(row.cells[0].top[0].probability)),
        (Column("target", drop=2, labelled=True),
         lambda row: probability(row.cells[0].target_probability)),
        (Column("rank"), lambda row: str(row.cells[0].target_rank)),
        (Column("entropy", drop=3, labelled=True), lambda row: f"{row.cells[0].entropy:.2f}"),
        (Column("KL"), lambda row: f"{row.cells[0].kl:.2f}"),
    ]  # fmt: skip
    if full is not None:
        bar = Column(" ", right=False)
        columns.insert(6, (bar, lambda row: _bar(row.cells[0].entropy, full[0])))
        columns.append((bar, lambda row: _bar(math.log1p(row.cells[0].kl), full[1])))
    for at in range(1, len(rows[0].cells[0].top)):
        columns.append((Column("" if at > 1 else "then", right=False, drop=3 + at), other(at)))
    return table(rows, columns, below=below)


def _bar(value: float, full: float) -> Text:
    length = round(BAR * min(1.0, value / full)) if full > 0 else 0
    return Text("█" * length, style=NUMBER)


def _other(token: LensToken, ink: Ink) -> str:
    """A token, cut where it is long, and its whole probability."""
    words = in_words(token)
    return f"{fitted(words, min(OTHER, cell_len(words)), ink)} {probability(token.probability)}"
