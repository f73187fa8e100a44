"""The logit lens in the terminal: layers × positions, or one position in detail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import ne

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from llmcli.commands.lens.report import LensCell, LensReport, LensRow, short_name
from llmcli.commands.lens.view.position import headline, position_table
from llmcli.ui.facts import confidence_legend
from llmcli.ui.grid import Fit, Grid, bar, gaps, last_columns
from llmcli.ui.layout import WIDEST, Line, fitted, in_cell, space
from llmcli.ui.palette import Ink
from llmcli.ui.theme import FAINT, HEADING, NUMBER, confidence_style, one_line

GUTTER = 8  # columns of a row's name
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
        below = height is None
        table = Fit(lambda width, ink: position_table(report, rows, below, width, ink))
        return Group(heading, headline(report), table, *_others(report, len(rows), whole))
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
    if report.from_prompt < len(report.positions):
        parts.append(f"{bar(ink)} from position {report.prompt_tokens} on the model wrote it")
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

