"""Patching: what restores the answer, in words and as a map, in the terminal, as page and PNG."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.patch.report import PatchCell, PatchReport
from llmcli.ui.grid import Fit
from llmcli.ui.layout import Line, fitted, in_words
from llmcli.ui.maps import DIGITS, Map, draw_map, map_png, on_page
from llmcli.ui.numbers import number
from llmcli.ui.page import checks, finite, page, token
from llmcli.ui.palette import Ink
from llmcli.ui.theme import HEADING, one_line

AROUND = 9  # lines of a screen beside the rows of the map and the places in words
LEAST = 4  # rows of a map at least
TOP = 5  # places in words
NOTHING = "no place changes the answer by more than rounding"
HALF = 0.5  # of a row's strongest place: what the layers around it have that are named


def patch_map(report: PatchReport) -> Map:
    """Layers across; positions down, or heads. Cells are what the patch changed of the answer.

    Positions before the first difference, which change nothing, are one row.
    """
    by_head = report.by == "head"
    shown = [cell for cell in report.cells if by_head or (cell.position or 0) >= report.first]
    rows = sorted({_row(cell) for cell in shown})
    same = [] if len(shown) == len(report.cells) else [_same(report)]
    values = np.full((len(same) + len(rows), report.layers), np.nan)
    values[: len(same)] = 0.0
    for cell in shown:
        values[len(same) + rows.index(_row(cell)), cell.layer] = report.effect(cell)
    names = [f"head {row}" if by_head else place(report, row) for row in rows]
    title = f"{report.what} by {report.by}"
    columns = [*map(str, range(report.layers))]
    names = [*same, *names]
    return Map(title=title, names=names, columns=columns, values=values, numbered=len(names))


def _row(cell: PatchCell) -> int:
    row = cell.position if cell.head is None else cell.head
    assert row is not None
    return row


def _same(report: PatchReport) -> str:
    before = [cell.position for cell in report.cells if (cell.position or 0) < report.first]
    return f"{_span([at for at in before if at is not None])} the same"


def _span(numbers: Sequence[int]) -> str:
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first}–{last}"


def place(report: PatchReport, at: int) -> str:
    """A position of the clean prompt, with both tokens where they differ."""
    clean, other = report.clean[at], report.corrupted[dict(report.aligned)[at]]
    return f"{at} {in_words(clean)}" + (f"≠{in_words(other)}" if other.id != clean.id else "")


def render_patch(
    report: PatchReport, title: str, *, height: int | None = None, whole: str = ""
) -> RenderableType:
    """What was patched, the strongest places in words, and the map of all.

    `title` is the model's line. `height`: of the screen in lines; a row of the map then stands for
    several heads, or positions. `whole` names the option that shows all.
    """
    words = strongest(report)
    most = None if height is None else max(LEAST, height - AROUND - len(words))

    def draw(width: int, ink: Ink) -> Iterator[RenderableType]:
        for line in words:
            yield Text(fitted(line, width, ink).rstrip(), no_wrap=True)

    of = patch_map(report) if report.by == "head" else _folded(patch_map(report), most, whole)
    drawn = Fit(lambda width, ink: draw_map(of, most, whole, width, ink))
    heading = Text(one_line(title), style=HEADING)
    return Group(heading, Line(list(_headline(report))), Fit(draw), drawn)


def _folded(of: Map, most: int | None, whole: str) -> Map:
    """At most `most` rows: the weakest of neighbours become one, a cell the stronger of two."""
    rows = list(zip(of.names, of.values, strict=True))
    while most is not None and len(rows) > most:
        strength = [float(np.nanmax(np.abs(values), initial=0.0)) for _, values in rows]
        at = int(np.argmin([max(pair) for pair in pairwise(strength)]))
        (upper, a), (lower, b) = rows[at : at + 2]
        name = "–".join((re.split("[– ]", upper)[0], re.split("[– ]", lower.split()[0])[-1]))
        values = np.where(np.abs(np.nan_to_num(a)) >= np.abs(np.nan_to_num(b)), a, b)
        rows[at : at + 2] = [(name, values)]
    names, found = [name for name, _ in rows], np.array([values for _, values in rows])
    note = "" if len(rows) == len(of.names) else f"; of several positions the strongest, {whole}"
    return replace(of, names=names, values=found, title=of.title + note, numbered=len(rows))


def _headline(report: PatchReport) -> Iterator[str]:
    """The number in both runs, and what was patched."""
    versus = "" if report.versus is None else f" − {in_words(report.versus)}"
    after = f"after {in_words(report.clean[-1])}"
    yield f"logit of {in_words(report.answer)}{versus} {after}"
    yield f"clean {number(report.clean_number, 4)} = 1"
    yield f"corrupted {number(report.corrupted_number, 4)} = 0"
    given, to = ("corrupted", "clean") if report.noising else ("clean", "corrupted")
    way = "" if report.to is None else f" by way of {report.to} alone"
    yield f"{given} {report.what} put into the {to} run{way}"
    if report.by == "head":
        yield f"at position{'s' * (len(report.positions) > 1)} {_span(report.positions)}"
        yield from (place(report, at) for at in report.positions if "≠" in place(report, at))
    if len(report.clean) != len(report.corrupted):
        yield "aligned: " + ", ".join(
            f"{_span([a for a, _ in some])} with corrupted {_span([b for _, b in some])}"
            for some in (report.aligned[: report.first], report.aligned[report.first :]) if some
        )  # fmt: skip


def _by_effect(report: PatchReport) -> list[PatchCell]:
    """The places that change anything, the strongest first."""
    found = filter(report.effect, report.cells)
    return sorted(found, key=lambda cell: -abs(report.effect(cell)))


def strongest(report: PatchReport) -> list[str]:
    """The `TOP` strongest heads, or positions with their layers, by how much they change."""
    if report.by == "head":
        cells = _by_effect(report)[:TOP]
        return [f"{number(c.value):>8}  layer {c.layer} head {c.head}" for c in cells] or [NOTHING]
    of, found = patch_map(report), []
    for name, effects in zip(of.names, np.nan_to_num(of.values), strict=True):
        best = int(np.abs(effects).argmax())
        if not effects[best]:
            continue
        near = effects * np.sign(effects[best]) >= HALF * abs(effects[best])
        first = last = best
        while first and near[first - 1]:
            first -= 1
        while last + 1 < len(near) and near[last + 1]:
            last += 1
        value = number(effects[best] + report.base)
        layers = f"layer {best}" if first == last else f"layer {best} (half in {first}–{last})"
        found.append((abs(effects[best]), f"{value:>8}  {name}: {layers}"))
    return [line for _, line in sorted(found, key=lambda pair: -pair[0])[:TOP]] or [NOTHING]


def patch_page(report: PatchReport, title: str) -> bytes:
    """The map and the strongest places as one HTML file. `title` names the model."""
    of, same = patch_map(report), len(report.clean) == len(report.corrupted)
    cells = _by_effect(report)[:100]
    places = [
        f"layer {cell.layer}, "
        + (f"head {cell.head}" if cell.position is None else place(report, cell.position))
        for cell in cells
    ]
    data = {
        "heading": "Patching",
        "terms_heading": "The strongest places",
        "note": "Cells are what the patch changes of the answer, 0 nothing; numbers on the right: "
        "0 corrupted, 1 clean.",
        "title": f"{title} · {report.dtype}",
        "words": list(_headline(report)),
        "tokens": [token(one) for one in report.clean],
        "corrupted": [token(one) for one in report.corrupted] if same else [],
        "maps": [on_page(of)],
        "terms": [
            [words, finite(cell.value, DIGITS)] for words, cell in zip(places, cells, strict=True)
        ],
        "checks": checks(report.checks),
    }
    return page("maps", f"Patching: {title}", data)


def patch_png(report: PatchReport, title: str) -> bytes:
    """The map as a PNG file, and the strongest places in the footer. `title` names the model."""
    heading = f"Patching: {next(_headline(report))}"
    footer = "; ".join(" ".join(line.split()) for line in strongest(report))
    return map_png(patch_map(report), heading, title, footer, report.ok)
