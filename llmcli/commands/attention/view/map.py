"""All heads at once: layers down, heads across, coloured by a metric, marked with their kinds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from llmcli.commands.attention.report.heads import AttentionReport, HeadReport, Label, Metric
from llmcli.ui.cells import Ink
from llmcli.ui.heatmap import ColourBar
from llmcli.ui.layout import WIDEST, filled
from llmcli.ui.palette import Kind, Scale
from llmcli.ui.theme import FAINT

MOST_LETTERS = 3  # kinds of one head that are marked
FOUND_LINES = 2  # of the heads of one kind that are named


def head_map(
    report: AttentionReport, metric: Metric, *, numbers: bool, kind: Kind = "linear"
) -> RenderableType:
    """The map of a metric with its colours; `numbers`: its values, else the letters of kinds."""
    scale = scale_of(report, metric, kind)
    words = f"{metric.name}, {metric.words}" + (", norm-weighted" if report.weighted else "")
    undefined = any(math.isnan(head.metrics[metric.name]) for head in _heads(report))
    key = MapKey(words, scale, "undefined" if undefined else "", numbers)
    return Group(HeadMap(report=report, metric=metric, scale=scale, numbers=numbers), key)


def scale_of(report: AttentionReport, metric: Metric, kind: Kind = "linear") -> Scale:
    """The metric's own range; where it has no end, up to the largest value there is."""
    values = [head.metrics[metric.name] for head in _heads(report)]
    most = max((value for value in values if math.isfinite(value)), default=metric.low)
    high = metric.high if metric.high is not None else max(most, metric.low)
    return Scale(low=metric.low, high=high if high > metric.low else metric.low + 1, kind=kind)


def _heads(report: AttentionReport) -> Iterator[HeadReport]:
    for layer in report.layers:
        yield from layer.heads


def shares(report: AttentionReport) -> bool:
    """Whether heads share keys and values."""
    return any(head.kv_head != head.head for head in _heads(report))


@dataclass(frozen=True, kw_only=True)
class HeadMap:
    """A line for each layer, a cell for each head, a bar between heads of different kv heads.

    Where the heads do not fit beside each other, the map goes on below.
    """

    report: AttentionReport
    metric: Metric
    scale: Scale
    numbers: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ink = Ink.of(console, options)
        layers = self.report.layers
        words = [self._cell(head, ink) for head in _heads(self.report)]
        cell = 1 + max((len(word) for word in words), default=1)
        kinds = len({layer.kind for layer in layers}) > 1
        names = [f"{layer.layer} {layer.kind}" if kinds else str(layer.layer) for layer in layers]
        gutter = max(len("layer"), *map(len, names)) + 1
        room = min(options.max_width, WIDEST) - gutter
        for number, heads in enumerate(self._blocks(room, cell)):
            if number:
                yield Segment.line()
            yield Segment(f"{'layer':<{gutter}}{self._header(heads, cell, ink)}", _faint())
            yield Segment.line()
            for name, layer in zip(names, layers, strict=True):
                yield Segment(f"{name:<{gutter}}")
                known = {head.head: head for head in layer.heads}
                for at, head in enumerate(heads):
                    if at and self._parted(heads[at - 1], head):
                        yield Segment("|" if ink.ascii else "│", _faint())
                    yield self._segment(known.get(head), cell, ink)
                yield Segment.line()

    def _blocks(self, room: int, cell: int) -> Iterator[list[int]]:
        """The numbers of the heads in blocks as wide as there is room, groups whole if they fit."""
        heads = sorted({head.head for head in _heads(self.report)})
        while heads:
            used, count = 0, 0
            whole = 0  # so many, up to the end of a group
            for at, head in enumerate(heads):
                parted = at > 0 and self._parted(heads[at - 1], head)
                whole = at if parted else whole
                used += cell + parted
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
        return {head.head: head.kv_head for head in _heads(self.report)}

    def _header(self, heads: Sequence[int], cell: int, ink: Ink) -> str:
        """The numbers of the heads over their cells, of those that have room."""
        line, place = "", 0
        for at, head in enumerate(heads):
            place += at > 0 and self._parted(heads[at - 1], head)
            start = place + cell - len(str(head)) if cell > len(str(head)) else place
            if start > len(line) or not line:
                line = f"{line:<{start}}{head}"
            place += cell
        return line

    def _cell(self, head: HeadReport, ink: Ink) -> str:
        value = head.metrics[self.metric.name]
        if self.numbers:
            return ink.dot if math.isnan(value) else short(value, self.metric.high == 1.0)
        letters = [label.letter for label in self.report.labels if label.name in head.labels]
        if letters:
            return "".join(letters[:MOST_LETTERS])
        return ink.dot if math.isnan(value) else "" if ink.kind != "shades" else "-"

    def _segment(self, head: HeadReport | None, cell: int, ink: Ink) -> Segment:
        if head is None:
            return Segment(" " * cell)
        value = np.array([head.metrics[self.metric.name]])
        style = ink.behind(int(ink.codes(self.scale.fractions(value))[0]))
        return Segment(f"{self._cell(head, ink):>{cell}}", style)


@dataclass(frozen=True)
class MapKey:
    """What a map's colours mean, and its signs; without colour a map has signs alone.

    `words` say what the metric is, `undefined` what the dot is, empty where there is none.
    `numbers`: the signs are the metric's values.
    """

    words: str
    scale: Scale
    undefined: str
    numbers: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ink = Ink.of(console, options)
        if ink.kind != "shades":
            yield ColourBar(f"colour: {self.words}", self.scale, self.undefined)
            return
        signs = ["- of no kind"] if not self.numbers else []
        signs += [f"{ink.dot} {self.undefined}"] if self.undefined else []
        if self.numbers:
            yield Text(self.words)
        if signs:
            yield Text("   ".join(signs), style=FAINT)


def short(value: float, share: bool) -> str:
    """At most four signs: `.07` and `1.0` of a share, `7.43`, `12.1`, `1234` of anything else."""
    if math.isinf(value):
        return "∞"
    if share:
        return f"{value:.2f}".lstrip("0") if abs(value) < 0.995 else f"{value:.1f}"
    size = abs(value)
    return f"{value:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def kinds_found(report: AttentionReport) -> RenderableType:
    """For every kind of head its threshold and the heads that are of it, the clearest first."""
    return Group(*(Found(report, label) for label in report.labels))


@dataclass(frozen=True)
class Found:
    """The heads of one kind: as many as two lines hold, and how many there are besides."""

    report: AttentionReport
    label: Label

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        rule, *heads = self.parts()
        for count in range(len(heads), -1, -1):
            left = len(heads) - count
            lines = filled([rule, *heads[:count], *([f"{left} more"] if left else [])], width)
            if len(lines) <= FOUND_LINES or not count:
                yield Text("\n".join(lines))
                return

    def parts(self) -> list[str]:
        """The rule with the number of heads, and then each of them with its value."""
        label = self.label
        known = sorted(
            (
                (head.metrics[label.metric], head, f"{layer.layer}.{head.head}")
                for layer in self.report.layers
                for head in layer.heads
                if not math.isnan(head.metrics[label.metric])
            ),
            key=lambda one: -one[0],
        )
        found = [
            f"{name} {short(value, True)}" for value, head, name in known
            if label.name in head.labels
        ]  # fmt: skip
        return [
            f"{label.letter} {label.name} ({self._rule()}): {self._count(found, known)}",
            *found,
        ]

    def _rule(self) -> str:
        rows = self.report.rows.get(self.label.metric)
        rule = f"{self.label.metric} ≥ {self.label.threshold:g}"
        return rule + ("" if rows is None else ", 1 row" if rows == 1 else f", {rows} rows")

    def _count(self, found: Sequence[str], known: Sequence[tuple[float, HeadReport, str]]) -> str:
        untold = dict(self.report.unlabelled).get(self.label.name)
        if found:
            count = f"{len(found)} head" + ("s" if len(found) != 1 else "")
            return count + (f"; elsewhere not told, {untold}" if untold else "")
        if untold:
            return f"not told, {untold}"
        if not known:
            return "none"
        value, _, name = known[0]
        # cut, not rounded: what is below the threshold shall not look like it
        return f"none; highest {name} {short(math.floor(value * 100) / 100, True)}"


def _faint() -> Style:
    return Style.parse(FAINT)
