"""Which experts tokens take: in the terminal, as a page, as a PNG for a paper.

In the terminal a map of layers and positions, and a table of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from llmcli.commands.experts.report import ExpertsLayer, ExpertsReport
from llmcli.records.numbers import best_groups
from llmcli.ui import png
from llmcli.ui.grid import (
    ColourBar,
    Fit,
    Grid,
    gaps,
    last_columns,
    position_words,
    written_note,
)
from llmcli.ui.layout import WIDEST, Column, Line, Rows, fitted, in_cell, in_words, table
from llmcli.ui.numbers import number
from llmcli.ui.page import checks, finite, page, token
from llmcli.ui.palette import Ink, Scale
from llmcli.ui.theme import FAINT, HEADING, NUMBER, one_line

NAME, GAP = 6, 1  # columns of a layer's number, and those between two cells
LEAST, MOST = 4, 12  # columns of a cell
FEW = 5  # positions that are shown even where that leaves fewer experts in a cell
TOKEN = 16  # columns of a token in the table, at most
TOP = 3  # experts that are named as the ones chosen most
SHORT = (0, 1, 2)  # how short a table may be: from everything to one of those experts
BARS, ASCII_BARS, UNUSED = "▁▂▃▄▅▆▇█", "123456789", "·"
BETWEEN = 90  # pixels between the choices and the load
LEFT = png.MARGIN + 70  # where boxes begin: behind the numbers of layers
DIGITS = 4  # of a number in the page


def render_experts(report: ExpertsReport, title: str) -> RenderableType:
    """The map and the table, or the table of a single position; `title` is the model's line."""
    heading = Text(one_line(title), style=HEADING)
    if len(report.positions) == 1:
        return Group(heading, *_position(report))
    scale = weight_scale(report)
    legend = ColourBar("weight of the chosen experts", scale, masked="")
    grid = Fit(lambda width, ink: _map(report, scale, width, ink))
    layers = Fit(lambda width, ink: _layers_table(report, width, ink))
    return Group(heading, grid, legend, Text(), layers)


def weight_scale(report: ExpertsReport) -> Scale:
    """From nothing to the largest weight there is."""
    most = max(float(np.nanmax(layer.weights, initial=0.0)) for layer in report.layers)
    return Scale(low=0.0, high=most or 1.0)


def share(value: float | None) -> str:
    """`31 %`, – where there is none."""
    return "–" if value is None else f"{100 * value:.0f} %"


def _map(
    report: ExpertsReport, scale: Scale, width: int, ink: Ink
) -> Iterator[RenderableType | Segment]:
    """A line for each layer, a column for each of as many of the last positions as fit.

    In a cell the numbers of the chosen experts, the largest score first, as many as fit; behind
    each the colour of its weight, or a shade after it. A line parts what the model wrote.
    """
    width = min(width, WIDEST)
    digits = len(str(max(layer.experts for layer in report.layers) - 1))
    most = max(layer.per_token for layer in report.layers)
    named = max(1, min(most, MOST // (digits + 1)))  # experts of a cell
    few = min(FEW, len(report.positions))
    while named > 1 and (width - NAME + GAP) // (named * (digits + 1) + GAP) < few:
        named -= 1
    cell = max(LEAST, named * (digits + 1))
    places = last_columns([cell] * len(report.positions), width - NAME + GAP, GAP)
    positions = [report.positions[place] for place in places]
    tokens = [in_cell(report.tokens[position], ink) for position in positions]
    before = ["", *gaps(places, GAP, report.from_prompt, ink)[1:]]
    grid, widths = Grid(ink=ink, gutter=NAME, before=before), [cell] * len(places)
    yield from grid.words("at", [str(position) for position in positions], widths)
    yield from grid.words("token", tokens, widths, HEADING)
    for layer in report.layers:
        codes_PK = ink.codes(scale.fractions(layer.weights[places.start :, :named])).tolist()
        chosen_PK = layer.chosen[places.start :, :named].tolist()
        cells = [
            list(_cell(chosen_K, codes_K, digits, cell, ink))
            for chosen_K, codes_K in zip(chosen_PK, codes_PK, strict=True)
        ]
        yield from grid.line(f"{layer.layer:>{NAME - 2}}", cells)
    notes = ["the experts that each token takes in each layer, the largest score first"]
    if named < most:
        notes.append(f"the first {named} of {most}")
    notes += written_note(report.positions, report.prompt_tokens, ink)
    if len(places) < len(report.positions):
        shown = f"positions {positions[0]} to {positions[-1]}"
        notes += [
            f"{shown} of {len(report.tokens)} tokens",
            "others with --position, --json and -o have all",
        ]
    yield Line(notes, FAINT)


def _cell(
    chosen_K: Sequence[int], codes_K: Sequence[int], digits: int, columns: int, ink: Ink
) -> Iterator[Segment]:
    """Numbers of `digits` digits, then spaces up to `columns` columns."""
    for expert, code in zip(chosen_K, codes_K, strict=True):
        after = ink.shade(code) if ink.kind == "shades" else " "
        yield Segment(f"{expert:>{digits}}{after}", ink.behind(code))
    yield Segment(" " * (columns - len(chosen_K) * (digits + 1)))


def _layers_table(report: ExpertsReport, width: int, ink: Ink) -> Iterator[RenderableType]:
    """A row for each layer: load, the experts chosen most, balance, margins, the shared expert.

    Where that is too wide it is said shorter, before anything stands on a line of its own.
    """
    width = min(width, WIDEST)
    tables = [_rows(report, max(8, width // (4 + 2 * (short > 0))), ink, short) for short in SHORT]
    rows, pool = next((one for one in tables if one[0].fit(width)), tables[0])
    yield rows
    yield Line(list(_about_layers(report, pool, ink)), FAINT)


def _rows(report: ExpertsReport, room: int, ink: Ink, short: int) -> tuple[Rows, int]:
    """The table with bars in `room` columns, and how many experts one of these stands for.

    `short`: without the token of the smallest margin and without columns that say nothing;
    `short` fewer experts are named.
    """
    layers = report.layers
    pool = max(-(-layer.experts // room) for layer in layers)
    columns: list[tuple[Column, Callable[[ExpertsLayer], Text | str]]] = [
        (Column("layer"), lambda of: str(of.layer)),
        (Column("load", right=False), lambda of: load_bars(of.load, pool, ink)),
        (Column("most", right=False, drop=1), lambda of: _most(of, TOP - short)),
        (Column("balance", drop=2, labelled=True), lambda of: f"{of.balance:.2f}"),
    ]
    if not short or any(layer.unused for layer in layers):
        columns.append((Column("unused", drop=3, labelled=True), lambda of: str(len(of.unused))))
    columns += [
        (Column("margin", drop=4, labelled=True),
         lambda of: number(of.mean_margin, 2 if short else 3)),
        (Column("min", right=False, drop=5, labelled=True),
         lambda of: _smallest(report, of, ink, short)),
    ]  # fmt: skip
    if any(layer.shared_share is not None for layer in layers):
        columns.append((Column("shared", drop=6, labelled=True), lambda of: share(of.shared_share)))
    return table(layers, columns, below=True), pool


def _smallest(report: ExpertsReport, layer: ExpertsLayer, ink: Ink, short: int) -> str:
    """The smallest margin, and the token that it is of."""
    at = layer.smallest_at
    if at is None:
        return "–"
    if short:
        return number(layer.smallest_margin, 1)
    words = in_words(report.tokens[at])
    words = fitted(words, min(TOKEN, cell_len(words)), ink)
    return f"{number(layer.smallest_margin)} at {at} {words}"


def _about_layers(report: ExpertsReport, pool: int, ink: Ink) -> Iterator[str]:
    layers = report.layers
    each = "expert" if pool == 1 else f"{pool} experts"
    yield f"load: one mark per {each}, {UNUSED if not ink.ascii else '-'} unused"
    yield "balance: entropy of the load / ln E, 1 where all are chosen alike"
    scores = {layer.scores + " + correction" * layer.corrected for layer in layers}
    of = " or ".join(sorted(scores))
    yield f"margin: last chosen − first not chosen, mean and smallest, of {of}"
    grouped = next((layer for layer in layers if layer.groups > 1), None)
    if grouped is not None:
        best = best_groups(grouped.kept_groups, grouped.groups, grouped.group_best)
        yield f"within the best {best}"
    if any(layer.shared_share is not None for layer in layers):
        yield "shared: ‖shared‖ / (‖shared‖ + ‖routed‖), mean"


def load_bars(load: Sequence[int], pool: int, ink: Ink) -> Text:
    """How much each expert, or `pool` neighbours together, are chosen: bars up to the most."""
    sums = [sum(load[at : at + pool]) for at in range(0, len(load), pool)]
    bars, most = ASCII_BARS if ink.ascii else BARS, max(*sums, 1)
    text = Text(style=NUMBER)
    for one in sums:
        sign = bars[math.ceil(one / most * len(bars)) - 1]
        text.append(sign if one else "-" if ink.ascii else UNUSED, style="" if one else FAINT)
    return text


def _most(layer: ExpertsLayer, count: int) -> str:
    """The `count` experts chosen most, with the share of the tokens that take them."""
    order = sorted(range(layer.experts), key=lambda expert: -layer.load[expert])
    parts = [f"{at} {share(layer.load[at] / len(layer.chosen))}" for at in order[:count]]
    return ", ".join(part for part, at in zip(parts, order, strict=False) if layer.load[at])


def _position(report: ExpertsReport) -> Iterator[RenderableType]:
    """Everything about one position: a row for each layer."""
    where = position_words(report.tokens, report.positions[0], report.prompt_tokens)
    yield Line([where, "the experts that it takes, with what each counts"])

    def weights(of: ExpertsLayer) -> str:
        pairs = zip(of.chosen[0].tolist(), of.weights[0].tolist(), strict=True)
        return ", ".join(f"{expert}: {number(weight)}" for expert, weight in pairs)

    columns: list[tuple[Column, Callable[[ExpertsLayer], str]]] = [
        (Column("layer"), lambda of: str(of.layer)),
        (Column("expert: weight", right=False, cut=True, drop=1), weights),
        (Column("margin", drop=3, labelled=True), lambda of: number(float(of.margins[0]))),
        (Column("shared", drop=2, labelled=True), lambda of: share(of.shared_share)),
    ]
    yield table(report.layers, columns, below=True)


# files


def experts_page(report: ExpertsReport, title: str) -> bytes:
    """The whole report as one HTML file. `title` names the model."""
    data = {
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "tokens": [token(one) for one in report.tokens],
        "prompt_tokens": report.prompt_tokens,
        "positions": report.positions,
        "layers": [_layer(layer) for layer in report.layers],
        "checks": checks(report.checks),
    }
    return page("experts", f"Experts: {title}", data)


def _layer(layer: ExpertsLayer) -> dict[str, Any]:
    """`chosen` and `weights` position by position, one after the other."""
    shares = layer.shared_shares
    return {
        "layer": layer.layer,
        "experts": layer.experts,
        "per_token": layer.per_token,
        "about": about(layer),
        "load": layer.load,
        "balance": finite(layer.balance, DIGITS),
        "mean_weights": [finite(weight, DIGITS) for weight in layer.mean_weights],
        "chosen": layer.chosen.ravel().tolist(),
        "weights": [finite(weight, DIGITS) for weight in layer.weights.ravel().tolist()],
        "margins": [finite(margin, DIGITS) for margin in layer.margins.tolist()],
        "shared": None if shares is None else [finite(one, DIGITS) for one in shares.tolist()],
    }


def about(layer: ExpertsLayer) -> str:
    """How a layer's tokens choose, in words: `top 2 of 8 by softmax`."""
    words = f"top {layer.per_token} of {layer.experts} by {layer.scores}"
    words += " + correction" if layer.corrected else ""
    best = best_groups(layer.kept_groups, layer.groups, layer.group_best)
    return words + f", of {best}" * (layer.groups > 1)


def experts_png(report: ExpertsReport, title: str) -> bytes:
    """The last positions with their experts, coloured by weight; below, what each expert was
    chosen by all positions. `title` names the model.
    """
    first = max(0, len(report.positions) - png.MOST_TOKENS)
    positions, layers = report.positions[first:], report.layers
    scale = weight_scale(report)
    digits = round(png.width(str(max(layer.experts for layer in layers) - 1), png.LEAST)) + 10
    most = max(layer.per_token for layer in layers)
    bar = png.bar_width(scale, png.SMALL) + 40
    room = (png.WIDE - LEFT - png.MARGIN - bar) // len(positions) - png.BOX_GAP
    named = max(1, min(most, max(room, 60) // digits))

    def cell(row: int, column: int) -> list[tuple[float, str]]:
        layer, at = layers[row], first + column
        places = scale.fractions(layer.weights[at, :named]).tolist()
        return list(zip(places, map(str, layer.chosen[at, :named].tolist()), strict=True))

    grid = png.TokenGrid(
        left=LEFT, across=max(60, named * digits) + png.BOX_GAP, columns=len(positions),
        names=[str(layer.layer) for layer in layers], cell=cell, positions=positions,
        tokens=[report.tokens[position] for position in positions],
        written=report.from_prompt - first or -1,
    )  # fmt: skip
    width = max(png.NARROW, grid.right + bar + png.MARGIN)
    load = _load_grid(report, grid.bottom + BETWEEN, width)
    sheet = png.Sheet(width, load.bottom + 40 + png.FOOT)
    sheet.headings("Experts: which ones each token takes in every layer", title)
    grid.draw(sheet)
    height = max(150, len(layers) * png.ROW - png.BOX_GAP)
    sheet.colour_bar((grid.right + 30, png.TOP), height, scale, png.SMALL)
    words = f"load: how many of {len(report.positions)} tokens take each expert"
    sheet.text((LEFT, load.top - 44), words, png.FINE, png.INK, "ls")
    load.draw(sheet)
    load.numbers(sheet, range(load.columns), png.TINY)
    words = "numbers: the experts chosen, the largest score first, coloured by what they count"
    if named < most:
        words += f"; the first {named} of {most}"
    if first:
        words += f"; above the last {len(positions)} of {len(report.positions)} positions"
    sheet.footer(f"{words}; {about(layers[0])}", report.ok)
    return sheet.png()


def _load_grid(report: ExpertsReport, top: int, width: int) -> png.BoxGrid:
    """Layers down, experts across: the share of the tokens that take each, up to the most."""
    most = max(layer.experts for layer in report.layers)
    across = max(6, min(96, (width - LEFT - png.MARGIN) // most))
    shares = [np.array(layer.load) / len(layer.chosen) for layer in report.layers]

    def cell(row: int, column: int) -> list[tuple[float, str]]:
        if column >= len(shares[row]):
            return []
        part = float(shares[row][column])
        words = share(part) if across >= 64 else ""
        return [(part / (float(shares[row].max()) or 1.0), words)]

    return png.BoxGrid(
        left=LEFT, top=top, across=across, gap=1, columns=most, cell=cell,
        names=[str(layer.layer) for layer in report.layers],
    )
