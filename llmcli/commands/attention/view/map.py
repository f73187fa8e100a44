"""All heads at once: layers down, heads across, coloured by a metric, marked with their kinds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from llmcli.commands.attention.report.heads import AttentionReport, HeadReport
from llmcli.records.head_metrics import COMMON, Label, Metric
from llmcli.records.numbers import numbered
from llmcli.ui.cells import Ink
from llmcli.ui.grid import ColourBar, Fit, Grid, bar
from llmcli.ui.layout import WIDEST, Line, filled
from llmcli.ui.numbers import short
from llmcli.ui.palette import Kind, Scale
from llmcli.ui.theme import FAINT

LINES = 10  # of a map: with what stands around it a screen of 24 holds it
MOST_LETTERS = 3  # kinds of one head that are marked
BESIDE = 2  # columns between two groups of layers that stand beside each other
MANY = 4  # a kind that more than 1 of so many heads are of is quiet


def heads_of(report: AttentionReport) -> Iterator[HeadReport]:
    """Every head."""
    for layer in report.layers:
        yield from layer.heads


def shares(report: AttentionReport) -> bool:
    """Whether heads share keys and values."""
    return any(head.kv_head != head.head for head in heads_of(report))


def quiet_kinds(report: AttentionReport) -> tuple[str, ...]:
    """The kinds that so many heads are of that a letter for each would hide all others."""
    found = [label for head in heads_of(report) for label in head.labels]
    count = sum(1 for _ in heads_of(report))
    return tuple(name for name in COMMON if MANY * found.count(name) > count)


def scale_of(report: AttentionReport, metric: Metric, kind: Kind = "linear") -> Scale:
    """The metric's own range; where it has no end, up to the largest value there is."""
    values = [head.metrics[metric.name] for head in heads_of(report)]
    most = max((value for value in values if math.isfinite(value)), default=metric.low)
    high = metric.high if metric.high is not None else max(most, metric.low)
    return Scale(low=metric.low, high=high if high > metric.low else metric.low + 1, kind=kind)


def head_map(
    report: AttentionReport, metric: Metric, *, numbers: bool, kind: Kind = "linear"
) -> RenderableType:
    """The map of a metric with its colours; `numbers`: its values, else the letters of kinds."""
    scale = scale_of(report, metric, kind)
    words = f"{metric.name}, {metric.words}" if numbers else f"colour: {metric.name}"
    undefined = any(math.isnan(head.metrics[metric.name]) for head in heads_of(report))
    shown: list[RenderableType] = [
        HeadMap(report=report, metric=metric, scale=scale, numbers=numbers),
        Fit(lambda width, ink: _key(words, scale, undefined, numbers, ink)),
    ]
    if len(kinds := layer_kinds(report)) > 1:
        shown.append(Line(kinds, FAINT))
    return Group(*shown)


def layer_kinds(report: AttentionReport) -> list[str]:
    """`full: layers 5, 11` for every kind of layer."""
    alike: dict[str, list[int]] = {}
    for layer in report.layers:
        alike.setdefault(layer.kind, []).append(layer.layer)
    return [
        f"{kind}: {numbered('layer', layers)}" for kind, layers in alike.items()
    ]


@dataclass(frozen=True, kw_only=True)
class HeadMap:
    """A line for each layer, a cell for each head, a bar between heads of different kv heads.

    Layers stand beside each other where they would be too many lines. Where not even the heads
    of one layer fit beside each other, the map goes on below.
    """

    report: AttentionReport
    metric: Metric
    scale: Scale
    numbers: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ink = Ink.of(console, options)
        layout = self._arranged(min(options.max_width, WIDEST), ink)
        layers = self.report.layers
        for number, heads in enumerate(layout.blocks):
            if number:
                yield Segment.line()
            name = "layer" if layout.gutter > len("layer") else ""
            header = f"{name:<{layout.gutter}}{self._header(heads, layout, ink)}"
            width = layout.gutter + self._width(heads, layout) + BESIDE
            yield Segment(f"{header:<{width}}" * (layout.beside - 1) + header, Style.parse(FAINT))
            yield Segment.line()
            parted = [layout.bars and self._parted(*pair) for pair in pairwise(heads)]
            before = ["", *(bar(ink) if one else "" for one in parted)]
            lines = Grid(ink=ink, gutter=layout.gutter, before=before)
            for row in range(layout.lines):
                for at in range(row, len(layers), layout.lines):
                    if at >= layout.lines:
                        yield Segment(" " * BESIDE)
                    name = str(layers[at].layer)
                    name = name if layout.beside == 1 else f"{name:>{layout.gutter - 1}}"
                    known = {head.head: head for head in layers[at].heads}
                    cells = [[self._segment(known.get(one), layout, ink)] for one in heads]
                    yield from lines.part(name, cells, "")
                yield Segment.line()

    def _arranged(self, width: int, ink: Ink) -> _Layout:
        """The roomiest of the layouts that have few lines, else the one with fewest."""
        digits, count = len(str(self.report.layers[-1].layer)), len(self.report.layers)
        layouts = []
        for letters, cell, bars in self._cells(ink):
            layout = _Layout(letters, cell, bars, digits + 1, count, 1, (self._heads,))
            used = self._width(self._heads, layout) + layout.gutter
            beside = min((width + BESIDE) // (used + BESIDE), -(-count // LINES))
            if beside:
                lines = -(-count // beside)
                gutter = layout.gutter
                if beside == 1 and used - gutter + len("layer ") <= width:
                    gutter = max(gutter, len("layer "))
                layouts.append(_Layout(letters, cell, bars, gutter, lines, beside, (self._heads,)))
        few = next((layout for layout in layouts if layout.lines <= LINES), None)
        if few or layouts:
            return few or min(layouts, key=lambda layout: layout.lines)
        letters, cell, bars = self._cells(ink)[0 if self.numbers else -1]
        blocks = tuple(self._blocks(width - digits - 1, cell, bars=bars))
        return _Layout(letters, cell, bars, digits + 1, count, 1, blocks)

    def _cells(self, ink: Ink) -> list[tuple[int, int, bool]]:
        """Letters of a cell, its columns, and whether bars part groups: the roomiest first."""
        if self.numbers:
            widest = max(len(self._cell(head, 0, ink)) for head in heads_of(self.report))
            return [(0, widest + 1, True), (0, widest + 1, False)]
        found = max((len(self._letters(head)) for head in heads_of(self.report)), default=1)
        most = max(1, min(MOST_LETTERS, found))
        return [
            *((count, count + 1, True) for count in range(most, 0, -1)), (1, 2, False),
            (1, 1, True), (1, 1, False),
        ]  # fmt: skip

    @cached_property
    def _heads(self) -> list[int]:
        return sorted({head.head for head in heads_of(self.report)})

    def _width(self, heads: Sequence[int], layout: _Layout) -> int:
        parted = sum(self._parted(*pair) for pair in pairwise(heads))
        return len(heads) * layout.cell + parted * layout.bars

    def _blocks(self, room: int, cell: int, *, bars: bool) -> Iterator[list[int]]:
        """The numbers of the heads in blocks as wide as there is room, groups whole if they fit."""
        heads = self._heads
        while heads:
            used, count = 0, 0
            whole = 0  # so many, up to the end of a group
            for at, head in enumerate(heads):
                parted = at > 0 and self._parted(heads[at - 1], head)
                whole = at if parted else whole
                used += cell + (parted and bars)
                if at and used > room:
                    break
                count = at + 1
            count = whole if whole and count < len(heads) else count
            yield heads[:count]
            heads = heads[count:]

    def _parted(self, left: int, right: int) -> bool:
        """Whether the two heads have keys and values of their own, in a model that shares them."""
        return self._shared and self._group[left] != self._group[right]

    @cached_property
    def _shared(self) -> bool:
        return shares(self.report)

    @cached_property
    def _group(self) -> dict[int, int]:
        return {head.head: head.kv_head for head in heads_of(self.report)}

    @cached_property
    def _quiet(self) -> tuple[str, ...]:
        return quiet_kinds(self.report)

    def _header(self, heads: Sequence[int], layout: _Layout, ink: Ink) -> str:
        """The numbers of the heads over their cells, of those that have room."""
        line, place, cell, width = "", 0, layout.cell, self._width(heads, layout)
        for at, head in enumerate(heads):
            place += layout.bars and at > 0 and self._parted(heads[at - 1], head)
            start = place + cell - len(str(head)) if cell > len(str(head)) else place
            fits = start + len(str(head)) <= width
            if fits and (start > len(line) or not line):
                line = f"{line:<{start}}{head}"
            place += cell
        return line

    def _letters(self, head: HeadReport) -> str:
        """Of the kinds that are not quiet."""
        return "".join(
            label.letter for label in self.report.labels
            if label.name in head.labels and label.name not in self._quiet
        )  # fmt: skip

    def _cell(self, head: HeadReport, letters: int, ink: Ink) -> str:
        value = head.metrics[self.metric.name]
        if self.numbers:
            return ink.dot if math.isnan(value) else short(value, self.metric.high == 1.0)
        if found := self._letters(head)[:letters]:
            return found
        if head.labels:
            return ink.dot
        return "?" if math.isnan(value) else "" if ink.kind != "shades" else "-"

    def _segment(self, head: HeadReport | None, layout: _Layout, ink: Ink) -> Segment:
        if head is None:
            return Segment(" " * layout.cell)
        value = np.array([head.metrics[self.metric.name]])
        style = ink.behind(int(ink.codes(self.scale.fractions(value))[0]))
        text = self._cell(head, layout.letters, ink)
        if not self.numbers:  # what is unusual stands out
            style += Style(dim=True) if text == ink.dot else Style(bold=True)
        return Segment(f"{text:>{layout.cell}}", style)


@dataclass(frozen=True)
class _Layout:
    """How a map is arranged: `beside` groups of `lines` layers, the heads in `blocks` below.

    Of each head so many `letters` in `cell` columns, with `bars` between groups of heads.
    """

    letters: int
    cell: int
    bars: bool
    gutter: int
    lines: int
    beside: int
    blocks: Sequence[Sequence[int]]


def _key(
    words: str, scale: Scale, undefined: bool, numbers: bool, ink: Ink
) -> Iterator[RenderableType]:
    """What a map's colours mean, and its signs; without colour a map has signs alone.

    `words` say what the metric is; `undefined`: of some heads it is. `numbers`: the signs are the
    metric's values.
    """
    if ink.kind != "shades":
        yield ColourBar(words, scale, "undefined" if undefined and numbers else "")
        return
    signs = ["- unclassified"] if not numbers else [words]
    signs += [f"{ink.dot if numbers else '?'} undefined"] if undefined else []
    yield Text("   ".join(signs), style=FAINT)


def kinds_found(report: AttentionReport, left: Sequence[str] = ()) -> RenderableType:
    """For every kind of head its threshold and the heads that are of it, the clearest first.

    Kinds that no head is of stand together, and so do those that these tokens leave undetermined,
    but for those that are `left` to others.
    """
    shown: list[RenderableType] = []
    none = []
    for label in report.labels:
        found = Found(report, label)
        if found.count:
            shown.append(found)
        elif label.name not in report.unlabelled:
            none.append(found.highest)
    if none:
        shown.append(Line([f"no head: {none[0]}", *none[1:]], FAINT))
    if parts := unclear_kinds(report, left):
        shown.append(Line([f"undetermined: {parts[0]}", *parts[1:]], FAINT))
    return Group(*shown)


def unclear_kinds(report: AttentionReport, left: Sequence[str] = ()) -> list[str]:
    """The kinds that these tokens leave undetermined, but for those `left`, reason by reason."""
    unclear: dict[str, list[str]] = {}
    for name, why in report.unlabelled.items():
        if name not in left:
            unclear.setdefault(why, []).append(name)
    return [f"{', '.join(names)} ({why})" for why, names in unclear.items()]


@dataclass(frozen=True)
class Found:
    """The heads of one kind: as many as a line holds, a second one where there is little room."""

    report: AttentionReport
    label: Label

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        rule, heads = self._rule(Ink.of(console, options).dot), self._heads
        most = 1 if len(filled([rule, *heads[:1]], width)) == 1 else 2
        for count in range(len(heads), -1, -1):
            left = len(heads) - count
            lines = filled([rule, *heads[:count], *([f"{left} more"] if left else [])], width)
            if len(lines) <= most or not count:
                yield Text("\n".join(lines))
                return

    @property
    def count(self) -> int:
        """How many heads are of the kind."""
        return len(self._heads)

    @property
    def highest(self) -> str:
        """The kind, and the head that comes closest to it."""
        if not self._known:
            return self.label.name
        value, _, name = self._known[0]
        # cut, not rounded: what is below the threshold shall not look like it
        return f"{self.label.name} (highest {name} {short(math.floor(value * 100) / 100, True)})"

    @cached_property
    def _known(self) -> list[tuple[float, HeadReport, str]]:
        """The heads with their values and names, the largest first."""
        metric = self.label.metric
        known = (
            (head.metrics[metric], head, f"{layer.layer}.{head.head}")
            for layer in self.report.layers for head in layer.heads
            if not math.isnan(head.metrics[metric])
        )  # fmt: skip
        return sorted(known, key=lambda one: -one[0])

    @cached_property
    def _heads(self) -> list[str]:
        return [
            f"{name} {short(value, True)}" for value, head, name in self._known
            if self.label.name in head.labels
        ]  # fmt: skip

    def _rule(self, dot: str) -> str:
        label, count = self.label, self.count
        mark = dot if label.name in quiet_kinds(self.report) else label.letter
        of = sum(1 for _ in heads_of(self.report))
        return f"{mark} {label.name} ≥ {label.threshold:g}: {count} of {of} heads"
