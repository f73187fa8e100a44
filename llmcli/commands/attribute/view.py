"""Attribution: the strongest terms in words, and a map of all, in the terminal, as page and PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from llmcli.commands.attribute.report import AttributeReport
from llmcli.records.contribution import Contribution
from llmcli.ui import png
from llmcli.ui.grid import Fit, Grid
from llmcli.ui.layout import WIDEST, Line, fitted, in_words
from llmcli.ui.numbers import number
from llmcli.ui.page import checks, finite, page, token
from llmcli.ui.palette import Ink, Scale
from llmcli.ui.theme import FAINT, HEADING, one_line

AROUND = 8  # lines of a screen beside the rows of the map and the terms in words
LEAST = 4  # rows of a map at least
NAME = 16  # columns of the name of a row, at most
HALF, NARROW = 56, 60  # … of one of two terms side by side, at most; where none are
NINTHS = 9
SIDE = 26  # pixels of a cell of the picture
IN_THE_PAGE, DIGITS = 100, 6  # terms in words, and digits of a number
MLP = ("mlp", "expert", "shared expert")
WORDS = {"embed": "token embedding", "pos_embed": "position embedding"}
TITLES = {"resid_pre": "the stream before each layer", "head": "heads, all positions together"}


@dataclass(frozen=True, kw_only=True)
class Map:
    """Values `[rows, columns]`, NaN where there is nothing; `title` says of what.

    The first `numbered` rows are heads or positions. `sums`: the last row is the sum of all terms
    up to each column, on a scale of its own.
    """

    title: str
    names: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
    numbered: int
    sums: bool = False

    @property
    def scale(self) -> Scale:
        """Of all rows but the sums."""
        return Scale.around([self.values[: len(self.names) - self.sums]])

    def fractions(self) -> np.ndarray:
        """The places of all cells on their scales."""
        found = self.scale.fractions(self.values)
        if self.sums:
            found[-1] = Scale.around([self.values[-1]]).fractions(self.values[-1])
        return found


def maps(report: AttributeReport) -> list[Map]:
    """The maps of a report: layers across; heads down, or positions, a map for each kind."""
    if report.method == "direct":
        return [_terms_map(report)]
    return [_places_map(report, kind) for kind in dict.fromkeys(t.kind for t in report.terms)]


def _terms_map(report: AttributeReport) -> Map:
    """Heads, feed-forward, all else, and the sum so far; embeddings come first, the head last."""
    layers = 1 + max((t.layer for t in report.terms if t.layer is not None), default=-1)
    columns = ["in", *map(str, range(layers)), "out"]
    heads: list[list[tuple[str, int | None]]] = [[] for _ in columns]
    found: dict[tuple[str, int], float] = {}
    for term in report.terms:
        at = 0 if term.kind == "embedding" else 1 + (layers if term.layer is None else term.layer)
        row = "mlp" if term.kind in MLP else "other"
        if term.kind == "head":  # those of two mixers side by side follow one another
            row = f"head {len(heads[at])}"
            heads[at].append((term.name, term.index))
        found[row, at] = found.get((row, at), 0.0) + term.value
    count = max(map(len, heads))
    names = [f"head {head}" for head in range(count)]
    names += [name for name in ("mlp", "other") if any(row == name for row, _ in found)]
    values = np.full((len(names) + 1, len(columns)), np.nan)
    for (row, at), value in found.items():
        values[names.index(row), at] = value
    values[-1] = np.nansum(values[:-1], axis=0).cumsum()
    if not any(at > layers for _, at in found):
        columns, values = columns[:-1], values[:, :-1]
    return Map(
        title="what each part of each layer adds", names=[*names, "so far"], columns=columns,
        values=values, numbered=count, sums=True,
    )  # fmt: skip


def _places_map(report: AttributeReport, kind: str) -> Map:
    """Positions down; of heads, these, all positions together."""
    rows: dict[tuple[int, int], float] = {}
    for term in report.terms:
        down = term.index if kind == "head" else term.position
        if term.kind == kind and down is not None and term.layer is not None:
            rows[down, term.layer] = rows.get((down, term.layer), 0.0) + term.value
    values = np.full((1 + max(down for down, _ in rows), report.layers), np.nan)
    for place, value in rows.items():
        values[place] = value
    names = [
        f"head {at}" if kind == "head" else _place(report, at) for at in range(len(values))
    ]
    title = TITLES.get(kind, f"{kind} of each layer")
    columns = [*map(str, range(report.layers))]
    return Map(title=title, names=names, columns=columns, values=values, numbered=len(values))


def _place(report: AttributeReport, at: int) -> str:
    """A position with its token, or both tokens where they differ."""
    clean, other = report.tokens[at], (report.corrupted or report.tokens)[at]
    differs = "" if clean.id == other.id else f"≠{in_words(other)}"
    return f"{at} {in_words(clean)}{differs}"


def render_attribution(
    report: AttributeReport, title: str, *, top: int, height: int | None = None, whole: str = ""
) -> RenderableType:
    """What the number is, its strongest terms in words, and the map of all.

    `title` is the model's line. `height`: of the screen in lines, where a row of the map may stand
    for several. `whole` names the option that shows all.
    """
    most = None if height is None else max(LEAST, height - AROUND - -(-top // 2))
    of = maps(report)[0]
    return Group(
        Text(one_line(title), style=HEADING),
        Line(list(_headline(report))),
        Fit(lambda width, ink: _strongest(report, top, width, ink)),
        Fit(lambda width, ink: _drawn(of, most, whole, width, ink)),
    )


def _headline(report: AttributeReport) -> Iterator[str]:
    """The number, and how the terms make it up."""
    what = f"{report.number}[{','.join(map(str, report.index or ()))}]"
    if report.answer is not None:
        versus = "" if report.versus is None else f" − {in_words(report.versus)}"
        what = f"logit of {in_words(report.answer)}{versus}"
    yield f"{what} after {in_words(report.tokens[-1])} at {len(report.tokens) - 1}"
    if report.method == "gradient":
        yield f"clean {number(report.value, 5)}, corrupted {number(report.corrupted_value, 5)}"
        yield "(clean − corrupted) × gradient"
        return
    yield f"{number(report.value, 5)} = Σ {number(report.sum, 5)} of {len(report.terms)} terms"
    if report.number == "logits_raw":
        yield "before the soft cap, which is not linear"


def _by_size(report: AttributeReport) -> list[Contribution]:
    """The strongest term first, without the stream, which has all others in it."""
    terms = [term for term in report.terms if term.kind != "resid_pre"]
    return sorted(terms, key=lambda term: -abs(term.value))


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(value)}"


def _strongest(report: AttributeReport, top: int, width: int, ink: Ink) -> Iterator[RenderableType]:
    """The `top` strongest terms: half that add, on the left, and half that take away."""
    lines = [(t.value < 0, f"{_signed(t.value):>8}  {term_words(report, t)}")
             for t in _by_size(report)]  # fmt: skip
    sides = [[words for low, words in lines if low == side][: -(-top // 2)] for side in (0, 1)]
    if width < NARROW:
        sides = [[*sides[0], *sides[1]], []]
    half = min(width // 2, HALF) if sides[1] else width
    for at in range(max(map(len, sides))):
        left, right = (side[at] if at < len(side) else "" for side in sides)
        yield Text(f"{fitted(left, half - 1, ink)} {fitted(right, half, ink)}".rstrip())


def term_words(report: AttributeReport, term: Contribution) -> str:
    """`layer 3 head 2`, `layer 3 expert 17`, `token embedding`, `bias ln_final.b`."""
    words = WORDS.get(term.name, f"{term.kind} {term.name}")
    if term.kind != "bias" and term.layer is not None:
        part = term.name.split(".")[2].removesuffix("_out")
        kind = part if term.kind == "mixer" else term.kind
        if (kind == "head" and part != "attn") or (part != kind and part[-1].isdigit()):
            kind = f"{part} {kind}"  # a recurrent head, or of the second such part of the layer
        words = f"layer {term.layer} {kind}" + (f" {term.index}" if term.index is not None else "")
    return words if term.position is None else f"{words} at {_place(report, term.position)}"


def _drawn(
    of: Map, most: int | None, whole: str, width: int, ink: Ink
) -> Iterator[RenderableType | Segment]:
    """The map, in blocks of as many columns as fit: each cell in ninths of the largest."""
    ink, width = replace(ink, diverging=True), min(width, WIDEST)
    gutter = min(NAME, 5 + max(len(name) for name in of.names))  # of several heads at most
    blocks = -(-2 * len(of.columns) // max(2, width - gutter))
    of, note = pooled(of, None if most is None else most // blocks)
    gutter = min(NAME, max(len(name) for name in (*of.names, "layer"))) + 1
    cell = 3 if gutter + 3 * len(of.columns) <= width else 2
    fit, places = max(1, (width - gutter) // cell), of.fractions()
    codes = ink.codes(places)
    for first in range(0, len(of.columns), fit):
        columns, line = range(first, min(first + fit, len(of.columns))), ""
        for at, name in enumerate(of.columns[first : columns.stop]):
            start = (at + 1) * cell - len(name)
            if start > len(line) or not line:  # where it has room
                line = f"{line:<{start}}{name}"
        yield Text(f"{'layer':<{gutter}}{line}", style=FAINT)
        grid = Grid(ink=ink, gutter=gutter, before=[""] * len(columns))
        for row, name in enumerate(of.names):
            cells = [[_cell(places[row, at], int(codes[row, at]), cell, ink)] for at in columns]
            yield from grid.line(fitted(name, gutter - 1, ink).rstrip(), cells)
    parts = [f"{of.title}; 9 is {number(of.scale.high)}"]
    if of.sums:
        parts.append(f"so far: their sum; 9 is {number(float(np.abs(of.values[-1]).max()))}")
    yield Line([*parts, *([f"{note}, all: {whole}"] if note else [])], FAINT)


def _cell(place: float, code: int, width: int, ink: Ink) -> Segment:
    """`+9`, `−3`, a dot for what rounds to 0, nothing where there is none."""
    if np.isnan(place):
        return Segment(" " * width)
    ninths = round(2 * NINTHS * (place - 0.5))
    sign = "+" if ninths > 0 else "-" if ink.ascii else "−"
    text = f"{sign}{abs(ninths)}" if ninths else ink.dot
    return Segment(f"{text:>{width}}", ink.behind(code) if ninths else Style.parse(FAINT))


def pooled(of: Map, most: int | None) -> tuple[Map, str]:
    """At most `most` rows, and what to say of it.

    A cell is the strongest of several heads; of positions there are the strongest.
    """
    rest = range(of.numbered, len(of.names))
    if most is None or len(of.names) <= most or of.numbered < 2:
        return of, ""
    room, names = max(1, most - len(rest) - 1), []  # what is said of it takes a line
    strength = np.nan_to_num(np.abs(of.values))
    if not of.names[0].startswith("head"):
        best = np.sort(np.argsort(-strength.max(1), kind="stable")[:room])
        names, note = [of.names[at] for at in best], f"the strongest {room} of {of.numbered} rows"
        return replace(of, names=names, values=of.values[best], numbered=room), note
    each, values = -(-of.numbered // room), []
    for start in range(0, of.numbered, each):
        last = min(start + each, of.numbered) - 1
        best = start + strength[start : last + 1].argmax(0)
        values.append(of.values[best, np.arange(len(best))])
        names.append(f"head {start}–{last}" if last > start else of.names[start])
    shown = np.array([*values, *of.values[of.numbered :]])
    of = replace(of, names=[*names, *(of.names[at] for at in rest)], values=shown)
    return replace(of, numbered=len(names)), f"a cell is the strongest of {each} heads"


# files


def attribution_page(report: AttributeReport, title: str) -> bytes:
    """Every map and the strongest terms as one HTML file. `title` names the model."""

    def numbers(values: np.ndarray) -> list[list[float | None]]:
        return [[finite(value, DIGITS) for value in row] for row in values.tolist()]

    data = {
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "words": list(_headline(report)),
        "tokens": [token(one) for one in report.tokens],
        "corrupted": [token(one) for one in report.corrupted or ()],
        "maps": [
            {"title": one.title, "names": one.names, "columns": one.columns,
             "values": numbers(one.values), "places": numbers(one.fractions())}
            for one in maps(report)
        ],
        "terms": [
            [term_words(report, one), finite(one.value, DIGITS)]
            for one in _by_size(report)[:IN_THE_PAGE]
        ],
        "checks": checks(report.checks),
    }  # fmt: skip
    return page("attribute", f"Attribution: {title}", data)


def attribution_png(report: AttributeReport, title: str) -> bytes:
    """The first map as a PNG file, the strongest terms in its footer. `title` names the model."""
    of, note = pooled(maps(report)[0], png.MOST_TOKENS)
    names, top = [png.fitted(name, png.LEAST, 200) for name in of.names], png.TOP
    left = png.MARGIN + round(max(png.width(name, png.LEAST) for name in names)) + 16
    bar = 40 + png.bar_width(of.scale, png.SMALL) + png.MARGIN
    side = max(8, min(SIDE, (png.WIDE - left - bar) // len(of.columns)))
    right, high = left + side * len(of.columns), max(200, side * len(names))
    sheet = png.Sheet(max(png.NARROW, right + bar), top + high + png.FOOT)
    sheet.headings(f"Attribution: {next(_headline(report))}", title)
    sheet.cells((left, top), of.fractions(), side, diverging=True)
    for row, name in enumerate(names):
        sheet.text((left - 12, top + side * row + side // 2), name, png.LEAST, png.QUIET, "rm")
    for at in range(0, len(of.columns), -(-40 // side)):
        place = left + side * at + side // 2, top - 16
        sheet.text(place, of.columns[at], png.TINY, png.QUIET, "mm")
    sheet.colour_bar((right + 40, top), high, of.scale, png.SMALL)
    terms = (f"{term_words(report, one)} {_signed(one.value)}" for one in _by_size(report)[:5])
    parts = [of.title, *["so far has a scale of its own"] * of.sums, *filter(None, [note])]
    sheet.footer(f"{'; '.join(parts)}; {', '.join(terms)}", report.ok)
    return sheet.png()
