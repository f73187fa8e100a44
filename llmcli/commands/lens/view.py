"""The logit lens: in the terminal, as a page with every cell in full, as a PNG for a paper.

Layers down and positions across, or one position in detail: the embedding first, the model's own
output last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import ne

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from llmcli.commands.lens.report import LensCell, LensReport, LensRow, short_name
from llmcli.ui import png
from llmcli.ui.facts import confidence_legend
from llmcli.ui.grid import Fit, Grid, gaps, last_columns, position_words, written_note
from llmcli.ui.layout import WIDEST, Column, Line, Rows, fitted, in_cell, in_words, space, table
from llmcli.ui.numbers import probability
from llmcli.ui.page import checks, finite, page, token
from llmcli.ui.palette import Ink, Scale
from llmcli.ui.theme import FAINT, HEADING, NUMBER, confidence_style, one_line, quoted

GUTTER = 8  # columns of a row's name
LEAST, MOST, GAP = 4, 12, 2  # columns of a cell, and those between two
# lines of the screen beside the rows, the checks and the prompt of the shell included
AROUND_GRID, AROUND_POSITION, LEAST_ROWS = 13, 12, 4
SHARE = 4  # more of them where there is no colour: the probability in percent
BAR = 10  # columns of a bar
OTHER = 16  # columns of a token that is not the likeliest, at most
FINAL = 88  # pixels below the rows
BELOW = (22, 52)  # pixels below the rows: where they settle, and the targets
SCALE = Scale(low=0.0, high=1.0)
DIGITS = 6  # of a number in the page


def render_lens(
    report: LensReport,
    title: str,
    *,
    ranks: bool = False,
    height: int | None = None,
    whole: str = "",
) -> RenderableType:
    """The grid, or the table of a single position, and what its words mean.

    `title` is the model's line. A cell of the grid has its likeliest token, or with `ranks` the
    rank of the target. `height`: of the screen in lines, where only as many layers as fit are
    shown. `whole` names the option that shows what is left out.
    """
    heading = Text(one_line(title), style=HEADING)
    if len(report.positions) == 1:
        rows = some_rows(report.rows, None if height is None else height - AROUND_POSITION)
        below = height is None
        table = Fit(lambda width, ink: _position(report, rows, below, width, ink))
        return Group(heading, _headline(report), table, *_others(report, len(rows), whole))
    grid = Fit(lambda width, ink: _layers(report, ranks, height, whole, width, ink))
    return Group(heading, grid, Fit(lambda width, ink: _legend(report, ranks, ink)))


def some_rows(rows: Sequence[LensRow], most: int | None) -> Sequence[LensRow]:
    """At most `most` rows, always the first and the last; None: all.

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
    return max(1, (min(columns, WIDEST) - GUTTER - GAP) // (LEAST + GAP))


def _layers(
    report: LensReport, ranks: bool, height: int | None, whole: str, width: int, ink: Ink
) -> Iterator[RenderableType | Segment]:
    """As many of the last positions as fit; a bar before those that the model wrote.

    Colours say how probable a token is; where there are none, a number does. Of more layers than
    fit `height` some are shown.
    """
    around = AROUND_GRID + ranks - (ink.kind == "shades" and not ranks)
    rows = some_rows(report.rows, None if height is None else height - around)
    texts = [[_text(cell, ranks, ink) for cell in row.cells] for row in rows]
    tokens = [in_cell(report.tokens[position], ink) for position in report.positions]
    targets = [in_cell(target, ink) for target in report.targets] if ranks else []
    settled = [short_name(name) for name in report.settled]
    columns = list(zip(*texts, tokens, settled, *([targets] if targets else []), strict=True))
    share = SHARE if ink.kind == "shades" and not ranks else 0
    every = [share + min(MOST, max([LEAST, *map(cell_len, column)])) for column in columns]
    shown = last_columns(every, min(width, WIDEST) - GUTTER, GAP)
    widths = [every[at] for at in shown]
    grid = Grid(ink=ink, gutter=GUTTER, before=gaps(shown, GAP, report.from_prompt, ink))

    def words(name: str, words: Sequence[str], style: str = FAINT) -> Iterator[Segment]:
        return grid.words(name, [words[at] for at in shown], widths, style)

    yield from words("position", [str(position) for position in report.positions])
    yield from words("token", tokens, HEADING)
    if targets:
        yield from words("target", targets, NUMBER)
    yield from grid.rule("layer", widths)
    for row, own in zip(rows, texts, strict=True):
        cells = [[_cell(own[at], row.cells[at], ranks, every[at], share, ink)] for at in shown]
        yield from grid.line(short_name(row.name), cells)
    yield from grid.rule("", widths)
    yield from words("settled", settled)
    yield from _others(report, len(rows), whole, shown)


def _text(cell: LensCell, ranks: bool, ink: Ink) -> str:
    if ranks:
        share = f" ({cell.target_probability:.0%})" if ink.kind == "shades" else ""
        return f"{cell.target_rank}{share}"
    return in_cell(cell.top[0], ink)


def _cell(text: str, cell: LensCell, ranks: bool, width: int, share: int, ink: Ink) -> Segment:
    """A token in the colour of its probability, or `share` columns with it in percent."""
    probability = cell.target_probability if ranks else cell.top[0].probability
    style = "" if ink.kind == "shades" else confidence_style(probability)
    number = f"{100 * probability:>{share}.0f}" if share else ""
    return Segment(fitted(text, width - share, ink) + number, Style.parse(style))


def _legend(report: LensReport, ranks: bool, ink: Ink) -> Iterator[RenderableType]:
    """What a cell, its colour or its number, the line between columns and the last line mean."""
    percent = f" and its probability{'' if ranks else ' in %'}"
    what = f"rank of {report.target} (1: likeliest)" if ranks else "likeliest next token"
    parts = [f"{what} after each layer{percent if ink.kind == 'shades' else ''}"]
    if not ranks:
        parts.append(f"{space(ink)} is a space")
    parts += written_note(report.positions, report.prompt_tokens, ink)
    parts.append("settled: from this layer on the output's token stays likeliest")
    yield Line(parts, FAINT)
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
        yield Line([*parts, *([f"more: {', '.join(more)}"] if more else [])], FAINT)


# one position: a line for each row, with everything that is known of it


def _headline(report: LensReport) -> Line:
    """Where it is, what the model says there, and since which layer."""
    at, target, best = report.positions[0], report.targets[0], report.rows[-1].cells[0].top[0]
    parts = [
        position_words(report.tokens, at, report.prompt_tokens, after="after "),
        f"output {in_words(best)} {probability(best.probability)}",
    ]
    if target.id != best.id:
        parts.append(f"target {in_words(target)} {probability(target.probability)}")
    return Line([*parts, f"settled at {short_name(report.settled[0])}"])


def _position(
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
        f"target, rank: probability and rank of {in_words(target)}, {report.target}",
        "entropy and KL(output ‖ layer) in nats",
    ]
    if bars:
        words += [
            f"bars: entropy up to ln {report.vocabulary} = {full:.2f}, "
            "that of a uniform distribution",
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
        def cell(row: LensRow) -> Text:
            token = row.cells[0].top[at]
            short = fitted(words := in_words(token), min(OTHER, cell_len(words)), ink)
            return Text(f"{short} {probability(token.probability)}", style=FAINT)

        return cell

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


# files


def lens_page(report: LensReport, title: str) -> bytes:
    """The whole report as one HTML file. `title` names the model."""
    texts = {one.id: one.text for row in report.rows for cell in row.cells for one in cell.top}
    texts |= {target.id: target.text for target in report.targets}
    divergences = [cell.kl for row in report.rows for cell in row.cells if math.isfinite(cell.kl)]
    data = {
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "vocabulary": report.vocabulary,
        "tokens": [token(one) for one in report.tokens],
        "prompt_tokens": report.prompt_tokens,
        "positions": report.positions,
        "target": report.target,
        "targets": [{"id": one.id} for one in report.targets],
        "texts": {id: quoted(text)[1:-1] for id, text in texts.items()},
        "rows": [
            {
                "name": long_name(row.name),
                "full": row.name,
                "layer": row.layer,
                "cells": [_numbers(cell) for cell in row.cells],
            }
            for row in report.rows
        ],
        "settled": [long_name(name) for name in report.settled],
        "most_kl": max(divergences, default=0.0),
        "checks": checks(report.checks),
    }
    return page("lens", f"Logit lens: {title}", data)


def _numbers(cell: LensCell) -> list[float | int | None]:
    """Entropy, KL, rank and probability of the target, then the likeliest tokens in pairs."""
    first = [finite(cell.entropy, DIGITS), finite(cell.kl, DIGITS), cell.target_rank]
    pairs = [part for one in cell.top for part in (one.id, finite(one.probability, DIGITS))]
    return [*first, finite(cell.target_probability, DIGITS), *pairs]


def long_name(name: str) -> str:
    """`embedding`, `3 mid` and `3`: there is room for the word."""
    return short_name(name, embedding="embedding")


def lens_png(report: LensReport, title: str) -> bytes:
    """The grid as a PNG file: the last positions, coloured by probability.

    A line marks the row from which on the output's token is the likeliest in every layer, where
    that row is shown; another stands before what the model wrote. `title` names the model.
    """
    first = max(0, len(report.positions) - png.MOST_TOKENS)
    positions = report.positions[first:]
    names = [long_name(row.name) for row in report.rows]
    left = png.MARGIN + round(max(png.width(name, png.LEAST) for name in (*names, "settled"))) + 16
    bar = 40 + png.bar_width(SCALE, png.SMALL)
    room = png.WIDE - left - png.MARGIN - bar
    across = max(100, min(170, room // len(positions)))

    def cell(row: int, column: int) -> list[tuple[float, str]]:
        token = report.rows[row].cells[first + column].top[0]
        words = png.fitted(png.label(token), png.LEAST, across - png.BOX_GAP - 8)
        return [(token.probability, words)]

    grid = png.TokenGrid(
        left=left, across=across, names=names, columns=len(positions), cell=cell,
        tokens=[report.tokens[position] for position in positions], positions=positions,
        written=report.from_prompt - first,
    )  # fmt: skip
    width = max(png.NARROW, grid.right + bar + png.MARGIN)
    sheet = png.Sheet(width, grid.bottom + FINAL + png.FOOT)
    sheet.headings("Logit lens: the likeliest token after each layer", title)
    grid.draw(sheet)
    ends = [grid.bottom + below for below in BELOW]
    for y, words in zip((png.HEAD + 18, *ends), ("reads", "settled", "target"), strict=True):
        sheet.text((left - 12, y), words, png.LEAST, png.QUIET, "rm")
    for column in range(len(positions)):  # where it settles, a line above that row, and its target
        settled, target = report.settled[first + column], report.targets[first + column]
        for row, values in enumerate(report.rows):
            if values.name == settled:
                x, y = grid.corner(row, column)
                line = (x, y - png.BOX_GAP), (x + across - png.BOX_GAP - 1, y - 1)
                sheet.draw.rectangle(line, png.RED)
        for below, text in zip(BELOW, (long_name(settled), png.label(target)), strict=True):
            grid.words(sheet, column, grid.bottom + below, text)
    sheet.colour_bar((grid.right + 40, png.TOP), min(700, grid.bottom - png.TOP), SCALE, png.SMALL)
    words = f"target: {report.target}; settled, red line: from here on the output's token stays "
    words += "the likeliest"
    if report.from_prompt < len(report.positions):
        words += f"; the model wrote the tokens from position {report.prompt_tokens} on"
    if first:
        words += f"; the last {len(positions)} of {len(report.positions)} positions"
    sheet.footer(words, report.ok)
    return sheet.png()
