"""All heads at once: a map or a table of their metrics, and their kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from rich.console import Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from llmcli.commands.attention.report import AttentionReport, HeadReport, grouped
from llmcli.records.attention import COMMON, LINEAR, OVERWRITTEN, Label, Metric
from llmcli.records.numbers import numbered
from llmcli.ui.grid import ColourBar, Fit, Grid, bar
from llmcli.ui.layout import WIDEST, Column, Line, Rows, filled, table
from llmcli.ui.numbers import short
from llmcli.ui.palette import Ink, Kind, Scale
from llmcli.ui.theme import FAINT, NUMBER

LINES = 10  # of a map: with what stands around it a screen of 24 holds it
MOST_LETTERS = 3  # kinds of one head that are marked
BESIDE = 2  # columns between two groups of layers that stand beside each other
MANY = 4  # a kind of more than a fourth of the heads is quiet


def quiet_kinds(report: AttentionReport) -> tuple[str, ...]:
    """The kinds of so many heads that their letters would hide all others."""
    found = [label for head in report.heads.values() for label in head.labels]
    return tuple(name for name in COMMON if MANY * found.count(name) > len(report.heads))


def group_starts(report: AttentionReport) -> set[int]:
    """The heads that have other keys and values than the head before them."""
    groups = {head.head: head.kv_head for head in report.heads.values()}
    pairs = pairwise(sorted(groups)) if report.shares_keys else ()
    return {right for left, right in pairs if groups[left] != groups[right]}


def scale_of(report: AttentionReport, metric: Metric, kind: Kind = "linear") -> Scale:
    """The metric's own range; where it has no end, up to the largest value there is."""
    values = [head.metrics[metric.name] for head in report.heads.values()]
    most = max((value for value in values if math.isfinite(value)), default=metric.low)
    high = metric.high if metric.high is not None else max(most, metric.low)
    return Scale(low=metric.low, high=high if high > metric.low else metric.low + 1, kind=kind)


def head_map(
    report: AttentionReport, metric: Metric, *, numbers: bool, kind: Kind = "linear"
) -> RenderableType:
    """The map of a metric with its colours; `numbers`: its values, else the letters of kinds."""
    scale = scale_of(report, metric, kind)
    undefined = any(math.isnan(head.metrics[metric.name]) for head in report.heads.values())

    def draw(width: int, ink: Ink) -> Iterator[RenderableType | Segment]:
        yield from HeadMap(report, metric, scale, ink, numbers=numbers).lines(min(width, WIDEST))
        words = f"{metric.name}, {metric.words}" if numbers else f"colour: {metric.name}"
        if ink.kind != "shades":
            yield ColourBar(words, scale, "undefined" if undefined and numbers else "")
        else:  # the signs alone
            signs = [words if numbers else "- unclassified"]
            signs += [f"{ink.dot if numbers else '?'} undefined"] if undefined else []
            yield Text("   ".join(signs), style=FAINT)

    alike = grouped((layer.kind, layer.layer) for layer in report.layers)
    kinds = [f"{kind}: {numbered('layer', layers)}" for kind, layers in alike.items()]
    axes = "layers down, heads across"
    return Group(Fit(draw), Line([axes, *(kinds if len(kinds) > 1 else [])], FAINT))


@dataclass(frozen=True)
class _Layout:
    """How a map is arranged: `beside` groups of `lines` layers, the heads in `blocks` below.

    Each head has up to `letters` letters in `cell` columns; `bars` stand between groups of heads.
    """

    letters: int
    cell: int
    bars: bool
    gutter: int = 0
    beside: int = 1
    lines: int = 0
    blocks: Sequence[Sequence[int]] = ()


class HeadMap:
    """A line for each layer, a cell for each head, a bar between heads of different kv heads.

    Layers stand beside each other where they would be too many lines. Where not even the heads
    of one layer fit beside each other, the map goes on below.
    """

    def __init__(
        self, report: AttentionReport, metric: Metric, scale: Scale, ink: Ink, *, numbers: bool
    ) -> None:
        self._report, self._metric, self._scale = report, metric, scale
        self._ink, self._numbers, self._quiet = ink, numbers, quiet_kinds(report)
        self._heads = sorted({head.head for head in report.heads.values()})
        self._starts = group_starts(report)

    def lines(self, width: int) -> Iterator[Segment]:
        """The map in `width` columns."""
        layout, layers = self._arranged(width), self._report.layers
        for number, heads in enumerate(layout.blocks):
            if number:
                yield Segment.line()
            name = "layer" if layout.gutter > len("layer") else ""
            header = f"{name:<{layout.gutter}}{self._header(heads, layout)}"
            used = layout.gutter + self._width(heads, layout) + BESIDE
            yield Segment(f"{header:<{used}}" * (layout.beside - 1) + header, Style.parse(FAINT))
            yield Segment.line()
            bars = [layout.bars and head in self._starts for head in heads[1:]]
            before = ["", *(bar(self._ink) if one else "" for one in bars)]
            grid = Grid(ink=self._ink, gutter=layout.gutter, before=before)
            for row in range(layout.lines):
                for at in range(row, len(layers), layout.lines):
                    if at >= layout.lines:
                        yield Segment(" " * BESIDE)
                    name = str(layers[at].layer)
                    name = name if layout.beside == 1 else f"{name:>{layout.gutter - 1}}"
                    known = {head.head: head for head in layers[at].heads}
                    cells = [[self._segment(known.get(head), layout)] for head in heads]
                    yield from grid.part(name, cells, "")
                yield Segment.line()

    def _arranged(self, width: int) -> _Layout:
        """The roomiest of the layouts that have few lines, else the one with fewest."""
        count, found = len(self._report.layers), []
        gutter = len(str(self._report.layers[-1].layer)) + 1
        choices = self._choices()
        for layout in choices:
            used = self._width(self._heads, layout)
            beside = min((width + BESIDE) // (gutter + used + BESIDE), -(-count // LINES))
            if beside:
                named = beside == 1 and used + len("layer") < width
                wide = max(gutter, named * (len("layer") + 1))
                lines, blocks = -(-count // beside), [self._heads]
                found.append(
                    replace(layout, gutter=wide, beside=beside, lines=lines, blocks=blocks)
                )
        few = (layout for layout in found if layout.lines <= LINES)
        if found:
            return next(few, min(found, key=lambda layout: layout.lines))
        layout = choices[0 if self._numbers else -1]
        blocks = list(self._blocks(width - gutter, layout))
        return replace(layout, gutter=gutter, lines=count, blocks=blocks)

    def _choices(self) -> list[_Layout]:
        """The cells that a head can have, the roomiest first."""
        heads = self._report.heads.values()
        if self._numbers:
            widest = max(len(self._text(head, 0)) for head in heads)
            return [_Layout(0, widest + 1, True), _Layout(0, widest + 1, False)]
        most = min(MOST_LETTERS, max(1, *(len(self._letters(head)) for head in heads)))
        letters = [_Layout(count, count + 1, True) for count in range(most, 0, -1)]
        return [*letters, _Layout(1, 2, False), _Layout(1, 1, True), _Layout(1, 1, False)]

    def _width(self, heads: Sequence[int], layout: _Layout) -> int:
        bars = sum(head in self._starts for head in heads[1:]) * layout.bars
        return len(heads) * layout.cell + bars

    def _blocks(self, room: int, layout: _Layout) -> Iterator[list[int]]:
        """The numbers of the heads in blocks as wide as there is room, groups whole if they fit."""
        heads = self._heads
        while heads:
            count = next(
                (n for n in range(len(heads), 1, -1) if self._width(heads[:n], layout) <= room), 1
            )
            if count < len(heads):
                whole = (n for n in range(count, 0, -1) if heads[n] in self._starts)
                count = next(whole, count)
            yield heads[:count]
            heads = heads[count:]

    def _header(self, heads: Sequence[int], layout: _Layout) -> str:
        """The numbers of the heads over their cells, of those that have room."""
        line, place, cell, width = "", 0, layout.cell, self._width(heads, layout)
        for at, head in enumerate(heads):
            place += layout.bars and at > 0 and head in self._starts
            start = place + max(0, cell - len(str(head)))
            fits = start + len(str(head)) <= width
            if fits and (start > len(line) or not line):
                line = f"{line:<{start}}{head}"
            place += cell
        return line

    def _letters(self, head: HeadReport) -> str:
        """Of the kinds that are not quiet."""
        kinds = set(head.labels) - set(self._quiet)
        return "".join(label.letter for label in self._report.labels if label.name in kinds)

    def _text(self, head: HeadReport, letters: int) -> str:
        value = head.metrics[self._metric.name]
        if self._numbers:
            return self._ink.dot if math.isnan(value) else short(value, self._metric.high == 1.0)
        if head.labels:
            return self._letters(head)[:letters] or self._ink.dot
        return "?" if math.isnan(value) else "" if self._ink.kind != "shades" else "-"

    def _segment(self, head: HeadReport | None, layout: _Layout) -> Segment:
        if head is None:
            return Segment(" " * layout.cell)
        value, text = np.array([head.metrics[self._metric.name]]), self._text(head, layout.letters)
        style = self._ink.behind(int(self._ink.codes(self._scale.fractions(value))[0]))
        if not self._numbers:  # what is unusual stands out
            style += Style(dim=True) if text == self._ink.dot else Style(bold=True)
        return Segment(f"{text:>{layout.cell}}", style)


def kinds_found(report: AttentionReport, left: Sequence[str] = ()) -> RenderableType:
    """For every kind of head its threshold and the heads that are of it, the clearest first.

    Kinds that no head is of stand together, and so do those that these tokens leave undetermined,
    but for those that are `left` to others.
    """
    shown: list[RenderableType] = []
    none = []
    for label in report.labels:
        known = ranked(report, label.metric)
        if any(label.name in head.labels for _, _, head in known):
            shown.append(Fit(partial(_kind, report, label)))
        elif label.name not in report.unlabelled:
            none.append(label.name)
            for value, name, _ in known[:1]:
                # cut, not rounded: what is below the threshold shall not look like it
                none[-1] += f" (highest {name} {short(math.floor(value * 100) / 100, True)})"
    if none:
        shown.append(Line([f"no head: {none[0]}", *none[1:]], FAINT))
    if parts := unclear_kinds(report, left):
        shown.append(Line([f"undetermined: {parts[0]}", *parts[1:]], FAINT))
    return Group(*shown)


def ranked(report: AttentionReport, metric: str) -> list[tuple[float, str, HeadReport]]:
    """The heads by a metric, with its values and their names, the largest first."""
    values = [(head.metrics[metric], name, head) for name, head in report.heads.items()]
    return sorted((one for one in values if not math.isnan(one[0])), key=lambda one: -one[0])


def _kind(report: AttentionReport, label: Label, width: int, ink: Ink) -> Iterator[RenderableType]:
    """The heads of one kind: as many as a line holds, a second one where there is little room."""
    heads = [
        f"{name} {short(value, True)}"
        for value, name, head in ranked(report, label.metric)
        if label.name in head.labels
    ]
    mark = ink.dot if label.name in quiet_kinds(report) else label.letter
    many = f"{len(heads)} of {len(report.heads)} heads"
    rule, width = f"{mark} {label.name} ≥ {label.threshold:g}: {many}", min(width, WIDEST)
    most = 1 if len(filled([rule, *heads[:1]], width)) == 1 else 2
    for count in range(len(heads), -1, -1):
        left = len(heads) - count
        lines = filled([rule, *heads[:count], *([f"{left} more"] if left else [])], width)
        if len(lines) <= most or not count:
            yield Text("\n".join(lines))
            return


def unclear_kinds(report: AttentionReport, left: Sequence[str] = ()) -> list[str]:
    """The kinds that these tokens leave undetermined, but for those `left`, reason by reason."""
    unclear = grouped((why, name) for name, why in report.unlabelled.items() if name not in left)
    return [f"{', '.join(names)} ({why})" for why, names in unclear.items()]


def metric_table(report: AttentionReport, metrics: Sequence[Metric]) -> RenderableType:
    """The numbers of every head, then what each of them is; of one head they stand together."""
    if len(report.heads) == 1:
        shown: list[RenderableType] = [_one_head(report, metrics)]
    else:
        empty = [Text(words) for words in undefined_metrics(report, metrics)]
        metrics = [metric for metric in metrics if not _undefined(report, metric)]
        notes = [Line(definition(report, metric, named=True), FAINT) for metric in metrics]
        rows = [Fit(lambda width, ink: _metric_rows(report, metrics, width))] if metrics else []
        shown = [*rows, *notes, *empty]
    return Group(*shown, *unknown_values(report, metrics), *metric_notes(report))


def _metric_rows(
    report: AttentionReport, metrics: Sequence[Metric], width: int
) -> Iterator[RenderableType]:
    """A row for each head, a column for each of `metrics`.

    Columns that do not fit stand in further tables below.
    """
    heads = report.heads
    front: list[tuple[Column, Callable[[str], Text | str]]] = [(Column("head", right=False), str)]
    if report.shares_keys:
        front.append((Column("kv"), lambda of: str(heads[of].kv_head)))
    tables = [front]
    for metric in metrics:
        column = Column(metric.name), lambda of, metric=metric: _value(heads[of], metric)
        if len(tables[-1]) > len(front) and not table(heads, [*tables[-1], column]).fit(width):
            tables.append(front)
        tables[-1] = [*tables[-1], column]
    for number, columns in enumerate(tables):
        if number:
            yield Text()
        yield table(heads, columns)


def _undefined(report: AttentionReport, metric: Metric) -> bool:
    """Whether no head has a value of a metric."""
    return all(math.isnan(head.metrics[metric.name]) for head in report.heads.values())


def _value(head: HeadReport, metric: Metric) -> Text:
    value = head.metrics[metric.name]
    if math.isinf(value):
        return Text("∞", style=NUMBER)
    return Text("–") if math.isnan(value) else Text(f"{value:.4g}", style=NUMBER)


def undefined_metrics(report: AttentionReport, metrics: Sequence[Metric]) -> Iterator[str]:
    """A sentence for the metrics that no head has a value of, which says why."""
    none = (metric.name for metric in metrics if _undefined(report, metric))
    for why, names in grouped((_why(name), name) for name in none).items():
        yield f"{', '.join(names)}: undefined for every head, because {why}"


def _why(metric: str) -> str:
    """Why no row qualifies for a metric."""
    if metric in ("induction", "duplicate"):
        return "no token of this text occurs again within what a head sees"
    if metric.startswith("locality_"):
        return f"no row sees more than {metric.removeprefix('locality_')} keys"
    if metric in LINEAR:
        return "none of these heads has such a state"
    if metric == "learned_sink":
        return "none of these heads has a learned sink"
    return "there are too few tokens"


def unknown_values(report: AttentionReport, metrics: Sequence[Metric]) -> Iterator[RenderableType]:
    """What the signs stand for that are no numbers, where there are any."""
    values = [
        (layer.signed, metric.name, head.metrics[metric.name])
        for layer in report.layers
        for head in layer.heads
        for metric in metrics
    ]
    without = {  # whether it is none of this head's metrics
        name in LINEAR and (not signed or name == OVERWRITTEN)
        for signed, name, value in values
        if math.isnan(value)
    }
    if False in without:
        words = "–: undefined: no row qualifies, as for repeated tokens where none is repeated"
        yield Text(words, style=FAINT)
    if True in without:
        words = "–: only a head with a state has it; what is overwritten, one with the delta rule"
        yield Text(words, style=FAINT)
    if any(math.isinf(value) for _, _, value in values):
        words = "∞: at the end of these tokens, most of what was written is more than half there"
        yield Text(words, style=FAINT)


def _one_head(report: AttentionReport, metrics: Sequence[Metric]) -> Rows:
    """A row for each metric of the only head, with its definition beside or below it."""
    [head] = report.heads.values()
    columns: list[tuple[Column, Callable[[Metric], Text | str]]] = [
        (Column("metric", right=False), lambda of: of.name),
        (Column("value"), lambda of: _value(head, of)),
        (Column("definition", right=False, drop=1), lambda of: of.formula),
        (Column("rows", drop=2, labelled=True), lambda of: str(report.rows.get(of.name, ""))),
        (Column("source", right=False, drop=2), lambda of: of.source),
    ]
    return table(metrics, columns, below=True)


def metric_notes(report: AttentionReport) -> list[RenderableType]:
    """What metrics are of, where it is not the weights."""
    left = "entropies and distances of A[i,j] divided by its row's sum: a sink takes the rest"
    signs = "metrics of weights with signs are of |A[i,j]|, divided by its row's sum"
    notes = [left] * report.sinks + [signs] * report.signed
    return [Text(note, style=FAINT) for note in notes]


def definition(report: AttentionReport, metric: Metric, *, named: bool = False) -> list[str]:
    """The metric's formula, how many rows it is the mean of, and who defined it."""
    rows = report.rows.get(metric.name)
    mean_of = [] if rows is None else ["1 row" if rows == 1 else f"{rows} rows"]
    source = [metric.source] if metric.source else []
    return [f"{metric.name}: {metric.formula}" if named else metric.formula, *mean_of, *source]
