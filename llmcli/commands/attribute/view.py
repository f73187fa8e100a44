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

AROUND = 10  # lines of a screen beside the rows of the map and the terms in words
LEAST = 4  # rows of a map at least
NAME = 16  # columns of the name of a row, at most
NINTHS = 9
SIDE = 26  # pixels of a cell of the picture
ROWS = {"expert": "mlp", "shared expert": "mlp", "mlp": "mlp"}
WORDS = {"embed": "token embedding", "pos_embed": "position embedding"}
PLACES = {"resid_pre": "the stream before each layer", "head": "heads, all positions"}
DIGITS = 6  # of a number in the page


@dataclass(frozen=True, kw_only=True)
class Map:
    """Values `[rows, columns]`, NaN where there is nothing; `title` says of what.

    `first`: the number of the first column that is a layer. `sums`: the last row has a scale of its
    own, the sum of all terms up to each column.
    """

    title: str
    names: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
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
    """The maps of a report: layers across; heads down, or positions."""
    if report.method == "direct":
        return [_terms_map(report)]
    kinds = dict.fromkeys(term.kind for term in report.terms)
    return [_places_map(report, kind) for kind in kinds]


def _terms_map(report: AttributeReport) -> Map:
    """Heads, feed-forward, all else, and the sum so far; embeddings come first, the head last."""
    last = max((t.layer for t in report.terms if t.layer is not None), default=-1)
    ends = any(term.layer is None and term.kind != "embedding" for term in report.terms)
    columns = ["in", *map(str, range(last + 1)), *(["out"] if ends else [])]
    heads: list[dict[tuple[str, int | None], int]] = [{} for _ in columns]
    found: dict[tuple[str, int], float] = {}
    for term in report.terms:
        at = term.layer + 1 if term.layer is not None else -1 if term.kind != "embedding" else 0
        at %= len(columns)
        row = ROWS.get(term.kind, "other")
        if term.kind == "head":  # those of two mixers side by side follow one another
            row = f"head {heads[at].setdefault((term.name, term.index), len(heads[at]))}"
        found[row, at] = found.get((row, at), 0.0) + term.value
    names = [f"head {head}" for head in range(max(map(len, heads)))]
    names += [name for name in ("mlp", "other") if any(row == name for row, _ in found)]
    values = np.full((len(names) + 1, len(columns)), np.nan)
    for (row, at), value in found.items():
        values[names.index(row), at] = value
    values[-1] = np.nansum(values[:-1], axis=0).cumsum()
    title = "what each part of each layer adds"
    return Map(title=title, names=[*names, "so far"], columns=columns, values=values, sums=True)


def _places_map(report: AttributeReport, kind: str) -> Map:
    """Positions down; of heads, these, all positions together."""
    terms = [term for term in report.terms if term.kind == kind]
    down = [term.index if kind == "head" else term.position for term in terms]
    values = np.full((max(filter(None, down), default=0) + 1, report.layers), np.nan)
    for row, term in zip(down, terms, strict=True):
        assert row is not None
        assert term.layer is not None
        before = values[row, term.layer]
        values[row, term.layer] = term.value + (0.0 if np.isnan(before) else before)
    names = [f"head {row}" for row in range(len(values))]
    if kind != "head":
        names = [f"{at} {_differs(report, at)}" for at in range(len(values))]
    title = PLACES.get(kind, f"{kind} of each layer")
    return Map(title=title, names=names, columns=[*map(str, range(report.layers))], values=values)


def _differs(report: AttributeReport, at: int) -> str:
    clean, other = report.tokens[at], (report.corrupted or report.tokens)[at]
    return in_words(clean) if clean.id == other.id else f"{in_words(clean)}≠{in_words(other)}"


def render_attribution(
    report: AttributeReport, title: str, *, top: int, height: int | None = None, whole: str = ""
) -> RenderableType:
    """What the number is, its strongest terms in words, and the map of all.

    `title` is the model's line. `height`: of the screen in lines; a row of the map then stands for
    several heads, or only the strongest positions are there. `whole` names the option that shows
    all.
    """
    shown = Fit(lambda width, ink: _strongest(report, top, width, ink))
    most = None if height is None else max(LEAST, height - AROUND - -(-top // 2))
    drawn = Fit(lambda width, ink: _drawn(maps(report)[0], most, whole, width, ink))
    heading = Text(one_line(title), style=HEADING)
    return Group(heading, Line(list(_headline(report))), shown, drawn)


def _headline(report: AttributeReport) -> Iterator[str]:
    """The number, and how the terms make it up."""
    at = len(report.tokens) - 1
    after = f"after {in_words(report.tokens[-1])} at {at}"
    if report.answer is None:
        yield f"{report.number}[{','.join(map(str, report.index or ()))}] {after}"
    else:
        versus = "" if report.versus is None else f" − {in_words(report.versus)}"
        yield f"logit of {in_words(report.answer)}{versus} {after}"
    if report.method == "direct":
        yield f"{number(report.value, 5)} = Σ {number(report.sum, 5)} of {len(report.terms)} terms"
        if report.number == "logits_raw":
            yield "before the soft cap, which is not linear"
    else:
        yield f"clean {number(report.value, 5)}, corrupted {number(report.corrupted_value, 5)}"
        yield "(clean − corrupted) × gradient"


def _strongest(
    report: AttributeReport, top: int, width: int, ink: Ink
) -> Iterator[RenderableType]:
    """The `top` strongest terms: half that add, on the left, and half that take away."""
    terms = [term for term in report.terms if term.kind != "resid_pre"]
    terms = sorted(terms, key=lambda term: -abs(term.value))
    sides = [
        [f"{_signed(t.value):>8}  {term_words(report, t)}" for t in terms if (t.value < 0) == low]
        for low in (False, True)
    ]
    sides = [side[: -(-top // 2)] for side in sides]
    half = min(width, 2 * 44) // 2
    for at in range(max(map(len, sides))):
        left, right = (side[at] if at < len(side) else "" for side in sides)
        line = f"{fitted(left, half - 1, ink)} {right}" if right else left
        yield Text(fitted(line, width, ink).rstrip(), no_wrap=True)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(value)}"


def term_words(report: AttributeReport, term: Contribution) -> str:
    """`layer 3 head 2`, `layer 3 expert 17`, `token embedding`, `bias ln_final.b`."""
    if term.kind == "bias" or term.layer is None:
        words = WORDS.get(term.name, f"{term.kind} {term.name}")
    else:
        part = term.name.split(".")[2].removesuffix("_out")
        kind = part if term.kind == "mixer" else term.kind
        if (kind == "head" and part != "attn") or (part != kind and part[-1].isdigit()):
            kind = f"{part} {kind}"  # a recurrent head, or of the second such part of the layer
        words = f"layer {term.layer} {kind}" + (f" {term.index}" if term.index is not None else "")
    return words if term.position is None else f"{words} at {_place(report, term.position)}"


def _place(report: AttributeReport, at: int) -> str:
    return f"{at} {_differs(report, at)}"


def _drawn(
    of: Map, most: int | None, whole: str, width: int, ink: Ink
) -> Iterator[RenderableType | Segment]:
    """The map, in blocks of as many columns as fit: each cell in ninths of the largest."""
    ink = replace(ink, diverging=True)
    shown, note = _fewer(of, most)
    width = min(width, WIDEST)
    gutter = min(NAME, max(len(name) for name in (*shown.names, "layer"))) + 1
    cell = 3 if gutter + 3 * len(shown.columns) <= width else 2
    fit = max(1, (width - gutter) // cell)
    codes, ninths = ink.codes(shown.fractions()), 2 * NINTHS * (shown.fractions() - 0.5)
    for first in range(0, len(shown.columns), fit):
        columns = range(first, min(first + fit, len(shown.columns)))
        grid = Grid(ink=ink, gutter=gutter, before=[""] * len(columns))
        header = _header(shown.columns, columns, cell)
        yield Text(f"{'layer':<{gutter}}{header}", style=FAINT, no_wrap=True)
        for row, name in enumerate(shown.names):
            cells = [
                [_cell(ninths[row, at], int(codes[row, at]), cell, ink)] for at in columns
            ]
            yield from grid.line(fitted(name, gutter - 1, ink).rstrip(), cells)
    parts = [f"{shown.title}; 9 is {number(shown.scale.high)}"]
    if shown.sums:
        parts.append(f"so far: their sum; 9 is {number(float(np.abs(of.values[-1]).max()))}")
    yield Line([*parts, *([f"{note}; all: {whole}" if whole else note] if note else [])], FAINT)


def _header(columns: Sequence[str], shown: range, cell: int) -> str:
    """The names of the columns over their cells, of those that have room."""
    line = ""
    for at in shown:
        start = (at - shown.start) * cell + cell - len(columns[at])
        if start >= len(line) + bool(line) or not line:
            line = f"{line:<{start}}{columns[at]}"
    return line


def _cell(ninths: float, code: int, width: int, ink: Ink) -> Segment:
    """`+9`, `−3`, a dot for what rounds to 0, nothing where there is none."""
    if np.isnan(ninths):
        return Segment(" " * width)
    digit = round(abs(ninths))
    minus = "-" if ink.ascii else "−"
    text = f"{'+' if ninths > 0 else minus}{digit}" if digit else ink.dot
    return Segment(f"{text:>{width}}", ink.behind(code) if digit else Style.parse(FAINT))


def _fewer(of: Map, most: int | None) -> tuple[Map, str]:
    """At most `most` rows: the strongest of several heads, or the strongest positions."""
    kept = sum(not name.startswith("head ") for name in of.names) if of.sums else 0
    rows = len(of.names) - kept
    if most is None or len(of.names) <= most or rows < 2:
        return of, ""
    room = max(1, most - kept)
    strength = np.nan_to_num(np.abs(of.values))
    if of.names[0].startswith("head "):
        each = -(-rows // room)
        parts = [range(at, min(at + each, rows)) for at in range(0, rows, each)]
        chosen = [np.array(part)[strength[part].argmax(0)] for part in map(list, parts)]
        values = [of.values[best, np.arange(len(of.columns))] for best in chosen]
        names = [f"heads {part[0]}–{part[-1]}" if len(part) > 1 else f"head {part[0]}"
                 for part in parts]  # fmt: skip
        values += list(of.values[rows:])
        return replace(of, names=[*names, *of.names[rows:]], values=np.array(values)), (
            f"a cell is the strongest of {each} heads"
        )
    best = sorted(np.argsort(-strength.max(1), kind="stable")[:room].tolist())
    names = [of.names[at] for at in best]
    return replace(of, names=names, values=of.values[best]), f"the strongest {room} of {rows}"


# files


def attribution_page(report: AttributeReport, title: str) -> bytes:
    """Every map and the strongest terms as one HTML file. `title` names the model."""
    terms = sorted(report.terms, key=lambda term: -abs(term.value))[:100]
    data = {
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "words": list(_headline(report)),
        "tokens": [token(one) for one in report.tokens],
        "corrupted": [token(one) for one in report.corrupted or ()],
        "maps": [
            {
                "title": one.title,
                "names": one.names,
                "columns": one.columns,
                "values": [[finite(v, DIGITS) for v in row] for row in one.values.tolist()],
                "places": [[finite(v, DIGITS) for v in row] for row in one.fractions().tolist()],
            }
            for one in maps(report)
        ],
        "terms": [[term_words(report, one), finite(one.value, DIGITS)] for one in terms],
        "checks": checks(report.checks),
    }
    return page("attribute", f"Attribution: {title}", data)


def attribution_png(report: AttributeReport, title: str) -> bytes:
    """The first map as a PNG file, and the strongest terms in the footer. `title` names the model.
    """
    of, _ = _fewer(maps(report)[0], png.MOST_TOKENS)
    names = [png.fitted(name, png.LEAST, 200) for name in of.names]
    left = png.MARGIN + round(max(png.width(name, png.LEAST) for name in names)) + 16
    room = png.WIDE - left - png.MARGIN - png.bar_width(of.scale, png.SMALL) - 40
    side = max(8, min(SIDE, room // len(of.columns)))
    right, bottom = left + side * len(of.columns), png.TOP + side * len(names)
    width = max(png.NARROW, right + 40 + png.bar_width(of.scale, png.SMALL) + png.MARGIN)
    sheet = png.Sheet(width, max(bottom, png.TOP + 200) + png.FOOT)
    sheet.headings(f"Attribution: {' · '.join(_headline(report))}", title)
    sheet.cells((left, png.TOP), of.fractions(), side, diverging=True)
    for row, name in enumerate(names):
        sheet.text((left - 12, png.TOP + side * row + side // 2), name, png.LEAST, png.QUIET, "rm")
    for at in range(0, len(of.columns), -(-40 // side)):
        place = left + side * at + side // 2, png.TOP - 16
        sheet.text(place, of.columns[at], png.TINY, png.QUIET, "mm")
    sheet.colour_bar((right + 40, png.TOP), max(160, bottom - png.TOP), of.scale, png.SMALL)
    terms = sorted(report.terms, key=lambda term: -abs(term.value))[:5]
    words = ", ".join(f"{term_words(report, one)} {_signed(one.value)}" for one in terms)
    sums = "; so far has a scale of its own" if of.sums else ""
    sheet.footer(f"{of.title}{sums}; {words}", report.ok)
    return sheet.png()
