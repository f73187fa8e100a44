"""Numbers of heads, and pairs of tokens, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.attention.report.heads import AttentionReport, HeadReport, Pair
from llmcli.commands.attention.view.map import heads_of, shares
from llmcli.records.head_metrics import LINEAR, OVERWRITTEN, Metric
from llmcli.ui.cells import in_words
from llmcli.ui.grid import Fit
from llmcli.ui.layout import GAP, Column, Line, Rows
from llmcli.ui.numbers import span
from llmcli.ui.theme import FAINT, NUMBER


def _metric_rows(
    report: AttentionReport, metrics: Sequence[Metric], width: int
) -> Iterator[RenderableType]:
    """A row for each head, a column for each of `metrics`.

    Columns that do not fit stand in further tables below.
    """
    layers = report.layers
    heads = [(f"{one.layer}.{head.head}", head) for one in layers for head in one.heads]
    front = [Column("head", right=False)]
    used = max(len("head"), *(len(name) for name, _ in heads))
    if shared := shares(report):
        front.append(Column("kv"))
        used += len("kv" + GAP)
    for number, some in enumerate(_packed(report, metrics, width - used)):
        if number:
            yield Text()
        rows = [
            [
                Text(name),
                *([Text(str(head.kv_head))] if shared else []),
                *(_value(head, metric) for metric in some),
            ]
            for name, head in heads
        ]
        yield Rows([*front, *(Column(metric.name) for metric in some)], rows)


def _packed(
    report: AttentionReport, metrics: Sequence[Metric], room: int
) -> Iterator[list[Metric]]:
    """The metrics in groups that have room beside each other."""
    some: list[Metric] = []
    used = 0
    for metric in metrics:
        values = (_value(head, metric).cell_len for head in heads_of(report))
        width = len(GAP) + max(len(metric.name), *values)
        if some and used + width > room:
            yield some
            some, used = [], 0
        some.append(metric)
        used += width
    yield some


def _value(head: HeadReport, metric: Metric) -> Text:
    value = head.metrics[metric.name]
    if math.isinf(value):
        return Text("∞", style=NUMBER)
    return Text("–") if math.isnan(value) else Text(f"{value:.4g}", style=NUMBER)


def metric_table(report: AttentionReport, metrics: Sequence[Metric]) -> RenderableType:
    """The numbers of every head, then what each of them is; of one head they stand together."""
    heads = list(heads_of(report))
    if len(heads) == 1:
        shown: list[RenderableType] = [_column(report, heads[0], metrics)]
    else:
        empty = [Text(words) for words in undefined_metrics(report, metrics)]
        metrics = [
            metric for metric in metrics
            if not all(math.isnan(head.metrics[metric.name]) for head in heads)
        ]  # fmt: skip
        notes = [Line(definition(report, metric, named=True), FAINT) for metric in metrics]
        table = Fit(lambda width, ink: _metric_rows(report, metrics, width))
        shown = [table, *notes, *empty] if metrics else [*empty]
    unknown = [Text(words, style=FAINT) for words in unknown_values(report, metrics)]
    return Group(*shown, *unknown, *metric_notes(report))


def undefined_metrics(report: AttentionReport, metrics: Sequence[Metric]) -> Iterator[str]:
    """A sentence for the metrics that no head has a value of, which says why."""
    reasons: dict[str, list[str]] = {}
    for metric in metrics:
        if all(math.isnan(head.metrics[metric.name]) for head in heads_of(report)):
            reasons.setdefault(_why(metric.name), []).append(metric.name)
    for why, names in reasons.items():
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


def unknown_values(report: AttentionReport, metrics: Sequence[Metric]) -> Iterator[str]:
    """What the signs stand for that are no numbers, where there are any."""
    values = [
        (layer.signed, metric.name, head.metrics[metric.name])
        for layer in report.layers for head in layer.heads for metric in metrics
    ]  # fmt: skip
    without = {  # whether it is none of this head's metrics
        name in LINEAR and (not signed or name == OVERWRITTEN)
        for signed, name, value in values if math.isnan(value)
    }  # fmt: skip
    if False in without:
        yield "–: undefined: no row qualifies, as for repeated tokens where none is repeated"
    if True in without:
        yield "–: only a head with a state has it; what is overwritten, one with the delta rule"
    if any(math.isinf(value) for _, _, value in values):
        yield "∞: at the end of these tokens, most of what was written is more than half there"


def _column(report: AttentionReport, head: HeadReport, metrics: Sequence[Metric]) -> Rows:
    """A row for each metric of one head, with its definition beside or below it."""
    columns = [
        Column("metric", right=False),
        Column("value"),
        Column("definition", right=False, drop=1),
        Column("rows", drop=2, labelled=True),
        Column("source", right=False, drop=2),
    ]
    rows = [
        [
            Text(metric.name),
            _value(head, metric),
            Text(metric.formula),
            Text(str(report.rows.get(metric.name, ""))),
            Text(metric.source),
        ]
        for metric in metrics
    ]
    return Rows(columns, rows, below=True)


def metric_notes(report: AttentionReport) -> list[RenderableType]:
    """What metrics are of, where it is not the weights."""
    left = "entropies and distances of A[i,j] divided by its row's sum: a sink takes the rest"
    signs = "metrics of weights with signs are of |A[i,j]|, divided by its row's sum"
    notes = [left] * report.sinks + [signs] * report.signed
    return [Text(note, style=FAINT) for note in notes]


def definition(report: AttentionReport, metric: Metric, *, named: bool = False) -> list[str]:
    """The metric's formula, how many rows it is the mean of, and who defined it."""
    rows = report.rows.get(metric.name)
    counted = [] if rows is None else ["1 row" if rows == 1 else f"{rows} rows"]
    source = [metric.source] if metric.source else []
    return [f"{metric.name}: {metric.formula}" if named else metric.formula, *counted, *source]


def pair_table(
    report: AttentionReport,
    spans: tuple[tuple[int, int], tuple[int, int]] | None = None,
) -> RenderableType:
    """Which tokens attend to which, the largest first; `spans`: the queries and keys shown."""
    ranked = any(pair.rank_value != pair.weight for pair in report.pairs)
    columns = [
        Column("head", right=False),
        Column("query", right=False, cut=True),
        Column("key", right=False, cut=True),
        Column("weight", drop=1 if ranked else 0),
    ]
    columns += [Column("of its row")] if ranked else []
    rows = [_pair(pair, report, ranked) for pair in report.pairs]
    left = ": the first token and each token itself left out"
    if spans is not None:
        last = len(report.tokens)
        queries, keys = (span((low, min(high, last))) for low, high in spans)
        left = f" of queries {queries} and keys {keys}{left}"
    signs = ", where these have signs by its share |A[i,j]| / Σ_j |A[i,j]|"
    note = f"pairs of tokens{left}; ranked by weight{signs * report.signed}"
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
    return f"{at} {in_words(report.tokens[at])}"
