"""Numbers of heads, and pairs of tokens, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.attention.report import AttentionReport, HeadReport
from llmcli.records.head_metrics import LINEAR, OVERWRITTEN, Metric
from llmcli.ui.cells import in_words
from llmcli.ui.grid import Fit
from llmcli.ui.layout import Column, Line, Rows
from llmcli.ui.numbers import span
from llmcli.ui.theme import FAINT, NUMBER


def metric_table(report: AttentionReport, metrics: Sequence[Metric]) -> RenderableType:
    """The numbers of every head, then what each of them is; of one head they stand together."""
    if len(report.heads) == 1:
        shown: list[RenderableType] = [_one_head(report, metrics)]
    else:
        empty = [Text(words) for words in undefined_metrics(report, metrics)]
        metrics = [metric for metric in metrics if not _undefined(report, metric)]
        notes = [Line(definition(report, metric, named=True), FAINT) for metric in metrics]
        table = [Fit(lambda width, ink: _metric_rows(report, metrics, width))] if metrics else []
        shown = [*table, *notes, *empty]
    return Group(*shown, *unknown_values(report, metrics), *metric_notes(report))


def _metric_rows(
    report: AttentionReport, metrics: Sequence[Metric], width: int
) -> Iterator[RenderableType]:
    """A row for each head, a column for each of `metrics`.

    Columns that do not fit stand in further tables below.
    """
    front = {"head": [Text(name) for name in report.heads]}
    if report.shares_keys:
        front["kv"] = [Text(str(head.kv_head)) for head in report.heads.values()]
    tables = [dict(front)]
    for metric in metrics:
        values = [_value(head, metric) for head in report.heads.values()]
        wide = {**tables[-1], metric.name: values}
        if len(tables[-1]) > len(front) and not _table(wide, drop=1).fit(width):
            tables.append(front | {metric.name: values})
        else:
            tables[-1] = wide
    for number, columns in enumerate(tables):
        if number:
            yield Text()
        yield _table(columns)


def _table(columns: Mapping[str, Sequence[Text]], *, drop: int = 0) -> Rows:
    """Columns by their names, numbers to the right."""
    rows = list(zip(*columns.values(), strict=True))
    return Rows([Column(name, right=name != "head", drop=drop) for name in columns], rows)


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
    reasons: dict[str, list[str]] = {}
    for metric in metrics:
        if _undefined(report, metric):
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


def unknown_values(report: AttentionReport, metrics: Sequence[Metric]) -> Iterator[RenderableType]:
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
    columns = [
        Column("metric", right=False),
        Column("value"),
        Column("definition", right=False, drop=1),
        Column("rows", drop=2, labelled=True),
        Column("source", right=False, drop=2),
    ]
    rows: list[list[Text | str]] = [
        [metric.name, _value(head, metric), metric.formula,
         str(report.rows.get(metric.name, "")), metric.source]
        for metric in metrics
    ]  # fmt: skip
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


def pair_table(report: AttentionReport, *, zoomed: bool) -> RenderableType:
    """Which tokens attend to which, the largest first; `zoomed`: of a part of the tokens."""
    ranked = any(pair.rank_value != pair.weight for pair in report.pairs)
    columns = [
        Column("head", right=False),
        Column("query", right=False, cut=True),
        Column("key", right=False, cut=True),
        Column("weight", drop=1 if ranked else 0),
        Column("of its row"),
    ]
    rows: list[list[Text | str]] = [
        [f"{pair.layer}.{pair.head}", token(report, pair.query), token(report, pair.key),
         Text(f"{pair.weight:.4f}", style=NUMBER), f"{pair.rank_value:.4g}"]
        for pair in report.pairs
    ]  # fmt: skip
    if not ranked:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    left = ": the first token and each token itself left out"
    if zoomed:
        last = len(report.tokens)
        queries, keys = (span((low, min(high, last))) for low, high in report.part)
        left = f" of queries {queries} and keys {keys}{left}"
    if not rows:
        return Text(f"no pair of tokens{left}", style=FAINT)
    signs = ", where these have signs by its share |A[i,j]| / Σ_j |A[i,j]|" * report.signed
    note = f"pairs of tokens{left}; ranked by weight{signs}"
    return Group(Rows(columns, rows), Text(note, style=FAINT))


def token(report: AttentionReport, at: int) -> str:
    """`12 " the"`: a position with its token, its id where it has no text."""
    return f"{at} {in_words(report.tokens[at])}"
