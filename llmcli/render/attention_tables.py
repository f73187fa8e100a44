"""Numbers of heads, and pairs of tokens, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.render.attention_map import shares
from llmcli.render.layout import GAP, Column, Dotted, Rows
from llmcli.render.theme import FAINT, NUMBER, quoted
from llmcli.reports.attention import AttentionReport, HeadReport, Metric, Pair


@dataclass(frozen=True)
class MetricTable:
    """A row for each head, a column for each of `metrics`.

    Columns that do not fit stand in further tables below.
    """

    report: AttentionReport
    metrics: Sequence[Metric]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heads = [(f"{layer.layer}.{head.head}", head) for layer in self.report.layers
                 for head in layer.heads]  # fmt: skip
        shared = shares(self.report)
        front = [Column("head", right=False)] + ([Column("kv")] if shared else [])
        used = max(len("head"), *(len(name) for name, _ in heads)) + shared * (len("kv" + GAP))
        for number, some in enumerate(self._packed(options.max_width - used)):
            if number:
                yield Text()
            rows = [
                [Text(name), *([Text(str(head.kv_head))] if shared else []), *_values(head, some)]
                for name, head in heads
            ]
            yield Rows([*front, *(Column(metric.name) for metric in some)], rows)

    def _packed(self, room: int) -> Iterator[list[Metric]]:
        """The metrics in groups that have room beside each other."""
        some: list[Metric] = []
        used = 0
        for metric in self.metrics:
            width = len(GAP) + max(len(metric.name), 6)
            if some and used + width > room:
                yield some
                some, used = [], 0
            some.append(metric)
            used += width
        yield some


def _values(head: HeadReport, metrics: Sequence[Metric]) -> Iterator[Text]:
    for metric in metrics:
        value = head.metrics[metric.name]
        yield Text("–") if math.isnan(value) else Text(f"{value:.4g}", style=NUMBER)


def metric_table(report: AttentionReport, metrics: Sequence[Metric]) -> RenderableType:
    """The numbers of every head, then what each of them is."""
    notes = [Dotted(definition(report, metric, named=True), FAINT) for metric in metrics]
    undefined = any(
        math.isnan(head.metrics[metric.name])
        for layer in report.layers
        for head in layer.heads
        for metric in metrics
    )
    words = "–: no row counts: such as of repeated tokens where none is repeated"
    unknown = [Text(words, style=FAINT)] if undefined else []
    return Group(MetricTable(report, metrics), *notes, *unknown)


def definition(report: AttentionReport, metric: Metric, *, named: bool = False) -> list[str]:
    """The metric's formula, how many rows it is the mean of, and who defined it."""
    rows = report.rows.get(metric.name)
    counted = [] if rows is None else ["1 row" if rows == 1 else f"{rows} rows"]
    source = [metric.source] if metric.source else []
    return [f"{metric.name}: {metric.formula}" if named else metric.formula, *counted, *source]


def pair_table(report: AttentionReport, *, everything: bool) -> RenderableType:
    """Which tokens attend to which, the largest first.

    `everything`: nothing was left out; else the first token and each token itself were.
    """
    ranked = any(pair.rank_value != pair.weight for pair in report.pairs)
    columns = [
        Column("head", right=False),
        Column("query", right=False, cut=True),
        Column("key", right=False, cut=True),
        Column("weight", first_to_go=1 if ranked else 0),
    ]
    columns += [Column("× ‖v W_O‖")] if ranked else []
    rows = [_pair(pair, report, ranked) for pair in report.pairs]
    left = "" if everything else ": the first token and each token itself left out"
    by = "weight × ‖v W_O‖" if ranked else "weight"
    note = f"pairs of tokens ranked by {by}{left}"
    if not rows:
        note = f"no pair of tokens{left}"
    return Group(*([Rows(columns, rows)] if rows else []), Text(note, style=FAINT))


def _pair(pair: Pair, report: AttentionReport, ranked: bool) -> list[Text]:
    cells = [
        Text(f"{pair.layer}.{pair.head}"),
        Text(token(report, pair.query)),
        Text(token(report, pair.key)),
        Text(f"{pair.weight:.4f}", style=NUMBER),
    ]
    return [*cells, Text(f"{pair.rank_value:.4g}")] if ranked else cells


def token(report: AttentionReport, at: int) -> str:
    """`12 " the"`: a position with its token, its id where it has no text."""
    id, text = report.tokens[at]
    return f"{at} {quoted(text) if text else f'id {id}'}"
