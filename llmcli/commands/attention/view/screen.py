"""What the heads of a model attend to, as one page of a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.attention.report import AttentionReport, HeadReport, grouped
from llmcli.commands.attention.view.map import head_map, kinds_found, ranked, unclear_kinds
from llmcli.records.attention import COLOURED_BY, COMMON, LINEAR, OVERWRITTEN, Label, Metric
from llmcli.records.numbers import counted, numbered
from llmcli.ui.grid import ColourBar, Fit, Heatmap, Panels
from llmcli.ui.layout import SEPARATOR, WIDEST, Column, Line, Rows, in_words
from llmcli.ui.numbers import short, span
from llmcli.ui.palette import Ink, Kind, Scale
from llmcli.ui.theme import FAINT, HEADING, NUMBER, one_line

FEW = 64  # tokens that the rows of a heatmap name
FEW_ROWS = 32  # of repeated tokens: as many as `--synthetic 32` has
BY_REPEATS = ("induction", "duplicate")
SPREAD = ("effective_keys", "max_weight", "distance")  # of one head, besides those of kinds


@dataclass(frozen=True)
class FollowUps:
    """Command lines that hints begin with: the `same` run, and one over `repeated` tokens.

    `repeated` is None where tokens are repeated already.
    """

    same: str
    repeated: str | None


def render_attention(
    report: AttentionReport, title: str, options: AttentionOptions, calls: FollowUps
) -> RenderableType:
    """The model's line, the prompt, and what is requested, in the order of the options."""
    shown: list[RenderableType] = [Text(one_line(title), style=HEADING)]
    if not _names_all(report):
        shown.append(Fit(lambda width, ink: _prompt_line(report, width)))
    for number, view in enumerate(_views(report, options, calls)):
        shown += [Text(), view] if number else [view]
    left = [f"{name} was left out: {why}" for name, why in report.skipped.items()]
    return Group(*shown, *(Text(note, style=FAINT) for note in (*layer_notes(report), *left)))


def _views(
    report: AttentionReport, options: AttentionOptions, calls: FollowUps
) -> list[RenderableType]:
    table = [metric for metric in options.table if metric in report.metrics]
    shown: list[RenderableType] = []
    if report.matrices:
        shown.append(heatmaps(report, options.matrix_scale))
        if len(report.heads) == 1:
            shown[-1] = Group(shown[-1], head_summary(report, numbers=not table))
    if (mapped := options.mapped) is not None:
        shown.append(metric_map(report, mapped, options.scale or "linear", calls))
    if table:
        shown.append(metric_table(report, table))
    if options.top_pairs:
        shown.append(pair_table(report, zoomed=options.zoomed))
    return shown or [overview(report, calls)]


def _names_all(report: AttentionReport) -> bool:
    """Whether the rows of a heatmap name all tokens."""
    count = len(report.tokens)
    return [one.queries for one in report.matrices] == [(0, count)] and count <= FEW


def _prompt_line(report: AttentionReport, width: int) -> Iterator[RenderableType]:
    """How many tokens there are, and as many of the first and the last as a line holds."""
    count, words, width = len(report.tokens), _count(report), min(width, WIDEST)
    line = words
    for kept in range(min(count, WIDEST), -1, -1):
        last = kept // 3
        left = [f"… {count - kept} more"] if kept < count else []
        tokens = [token(report, at) for at in (*range(kept - last), *range(count - last, count))]
        tokens[kept - last : kept - last] = left
        if cell_len(longer := SEPARATOR.join([words, *tokens])) <= width:
            line = longer
            break
    yield Text(line, style=FAINT)


def _count(report: AttentionReport) -> str:
    words = f"{len(report.tokens)} token" + "s" * (len(report.tokens) != 1)
    if len(report.tokens) > report.prompt_tokens:
        words += f", from {report.prompt_tokens} on generated"
    return words


def layer_notes(report: AttentionReport) -> Iterator[str]:
    """What maps are that are no softmax: a sentence for each kind of layer."""
    alike = grouped((layer.note, layer) for layer in report.layers if layer.note)
    for note, layers in alike.items():
        kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
        yield f"{numbered('layer', [layer.layer for layer in layers])} ({kinds}): {note}"


def overview(report: AttentionReport, calls: FollowUps) -> RenderableType:
    """The map of all heads with the letters of their kinds, the heads found, and what is next."""
    metric = next(metric for metric in report.metrics if metric.name == COLOURED_BY)
    left = BY_REPEATS if calls.repeated else ()
    found = [head_map(report, metric, numbers=False), kinds_found(report, left)]
    hints = [_hint(*hint) for hint in _next(report, calls)]
    return Group(*found, *metric_notes(report), *hints)


def metric_map(
    report: AttentionReport, metric: Metric, kind: Kind, calls: FollowUps
) -> RenderableType:
    """The map of one metric with its values, and its definition; a sentence where it has none."""
    if (why := next(undefined_metrics(report, [metric]), None)) is not None:
        repeats = calls.repeated is not None and metric.name in BY_REPEATS
        hint = [_hint("try:", f"{calls.repeated} --map {metric.name}")] if repeats else []
        return Group(Text(why), *hint)
    about = Line(definition(report, metric), FAINT)
    shown = head_map(report, metric, numbers=True, kind=kind)
    return Group(shown, about, *unknown_values(report, [metric]), *metric_notes(report))


def _hint(words: str, call: str) -> RenderableType:
    """Words and a command line, which is never wrapped, so that it can be copied."""

    def draw(width: int, ink: Ink) -> Iterator[RenderableType]:
        beside = cell_len(f"{words} {call}") <= width
        if not beside:
            yield Text(words, style=FAINT)
        line = f"{words} {call}" if beside else call
        yield Text(line, style=FAINT, no_wrap=True, overflow="ignore")

    return Fit(draw)


def _next(report: AttentionReport, calls: FollowUps) -> Iterator[tuple[str, str]]:
    """What to run next: repeated text where there is little, and the clearest head.

    The clearest head of a kind is the one with the largest value. Unusual kinds come first, and
    those of repeated tokens where the text was made to show them.
    """
    rows = report.rows.get("induction", 0)
    if calls.repeated is not None and rows < FEW_ROWS:
        said = f"{counted(rows, 'row')} of repeated tokens only" if rows else (
            "no token comes twice"
        )
        yield f"induction, duplicate: {said}; try:", calls.repeated

    def common(label: Label) -> tuple[bool, bool]:
        return label.name in COMMON, calls.repeated is None and label.name not in BY_REPEATS

    clearest = (
        (name, f" ({label.name})")
        for label in sorted(report.labels, key=common)
        for _, name, head in ranked(report, label)
        if label.name in head.labels
    )
    name, kind = next(clearest, (next(iter(report.heads)), ""))
    layer, head = name.split(".")
    yield f"head {name}{kind}:", f"{calls.same} --layer {layer} --head {head}"


def heatmaps(report: AttentionReport, kind: Kind) -> RenderableType:
    """The matrices of the report, all on one scale: one with its tokens, several as panels."""
    scale, given = matrix_scale(report, kind), report.prompt_tokens
    words = "pattern: each row sums to 1" + " with its sink" * report.sinks
    if report.what == "scores":
        words = "scores: q·k before softmax"
    elif scale.signed:
        words = "pattern: weights with their signs, around 0"
    bar, shared = ColourBar(words, scale), report.shares_keys
    if len(report.matrices) > 1:
        titles = [
            f"{one.layer}.{one.head}" + f" kv {one.kv_head}" * shared for one in report.matrices
        ]
        return Group(
            Panels(matrices=report.matrices, titles=titles, scale=scale, given=given), bar
        )
    [matrix] = report.matrices
    tokens = [one.text or f"id {one.id}" for one in report.tokens]
    kinds = {layer.layer: layer.kind for layer in report.layers}
    words = f"layer {matrix.layer} ({kinds[matrix.layer]}), head {matrix.head}"
    words += f", kv head {matrix.kv_head}" * shared
    if _names_all(report):
        words += f", {_count(report)}"
    heading = Text(f"{words}, queries down, keys across", style=HEADING)
    return Group(heading, Heatmap(matrix=matrix, tokens=tokens, scale=scale, given=given), bar)


def matrix_scale(report: AttentionReport, kind: Kind) -> Scale:
    """The scale of all matrices: weights are 0 … 1 on every one.

    Scores, and weights with signs, are as far from zero as the largest of them.
    """
    if report.what == "scores" or any(matrix.signed for matrix in report.matrices):
        return Scale.around([matrix.values for matrix in report.matrices], kind)
    return Scale(low=0.0, high=1.0, kind=kind)


def head_summary(report: AttentionReport, *, numbers: bool) -> RenderableType:
    """The kinds that the only head of the report is of; `numbers`: and what it measures.

    These are the metrics that say most, but for those of the kinds, and those that it has no value
    of.
    """
    [head] = report.heads.values()
    parts = [
        f"{label.name} ({short(head.metrics[label.metric], True)} ≥ {label.threshold:g})"
        for label in report.labels if label.name in head.labels
    ] or ["unclassified"]  # fmt: skip
    if unclear := unclear_kinds(report):
        parts.append(f"undetermined: {', '.join(unclear)}")
    if not numbers:
        return Line(parts)
    said = (*head.labels, *report.unlabelled)
    shown = [label.metric for label in report.labels if label.name not in said]
    for metric in report.metrics:
        value = head.metrics[metric.name]
        if metric.name in (*shown, *SPREAD, *LINEAR) and not math.isnan(value):
            parts.append(f"{metric.name} {short(value, metric.high == 1.0)}")
    return Group(Line([*parts, "all: --metrics all"]), *metric_notes(report))


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
    mean_of = [] if rows is None else ["1 row" if rows == 1 else f"{rows} rows"]
    source = [metric.source] if metric.source else []
    return [f"{metric.name}: {metric.formula}" if named else metric.formula, *mean_of, *source]


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
