"""What the heads of a model attend to, as one page of a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.attention.report.heads import AttentionReport, HeadReport, LayerReport
from llmcli.commands.attention.report.request import AttentionRequest
from llmcli.commands.attention.view.map import (
    head_map,
    heads_of,
    kinds_found,
    shares,
    unclear_kinds,
)
from llmcli.commands.attention.view.tables import (
    definition,
    metric_notes,
    metric_table,
    pair_table,
    token,
    undefined_metrics,
    unknown_values,
)
from llmcli.records.head_metrics import COLOURED_BY, COMMON, LINEAR, Metric
from llmcli.records.matrix import Matrix
from llmcli.records.numbers import counted, numbered
from llmcli.ui.cells import Ink
from llmcli.ui.grid import ColourBar, Fit, Heatmap, Panels
from llmcli.ui.layout import SEPARATOR, WIDEST, Line
from llmcli.ui.numbers import short
from llmcli.ui.palette import Kind, Scale
from llmcli.ui.theme import FAINT, HEADING, one_line

FEW = 64  # tokens that the rows of a heatmap name
FEW_ROWS = 32  # of repeated tokens: as many as `--synthetic 32` has
BY_REPEATS = ("induction", "duplicate")
SPREAD = ("effective_keys", "max_weight", "distance")  # of one head, besides those of kinds


@dataclass(frozen=True)
class Calls:
    """Command lines that hints begin with: the `same` run, and one over `repeated` tokens.

    `repeated` is None where tokens are repeated already.
    """

    same: str
    repeated: str | None


def render_attention(
    report: AttentionReport, title: str, views: Sequence[RenderableType]
) -> RenderableType:
    """The model's line, the prompt, and the views."""
    shown: list[RenderableType] = [Text(one_line(title), style=HEADING)]
    if not _names_all(report):
        shown.append(Fit(lambda width, ink: _prompt_line(report, width)))
    for number, view in enumerate(views):
        shown += [Text(), view] if number else [view]
    left = [f"{name} was left out: {why}" for name, why in report.skipped.items()]
    notes = [*layer_notes(report), *left]
    return Group(*shown, *(Text(note, style=FAINT) for note in notes))


def _names_all(report: AttentionReport) -> bool:
    """Whether the rows of a heatmap name all tokens."""
    if len(report.matrices) != 1:
        return False
    [matrix] = report.matrices
    return matrix.queries == (0, len(report.tokens)) and len(report.tokens) <= FEW


def attention_views(
    report: AttentionReport, request: AttentionRequest, calls: Calls
) -> list[RenderableType]:
    """What is requested of the report, in the order of the options."""
    known = {metric.name for metric in report.metrics}
    table = [metric for metric in request.table if metric.name in known]
    shown: list[RenderableType] = []
    if request.drawn:
        shown.append(heatmaps(report, request.matrix_scale))
        if is_single(report):
            shown[-1] = Group(shown[-1], head_summary(report, numbers=not table))
    if request.map:
        shown.append(metric_map(report, request.map, request.scale or "linear", calls))
    if table:
        shown.append(metric_table(report, table))
    if request.pairs:
        last = len(report.tokens)
        spans = (request.queries or (0, last), request.keys or (0, last))
        shown.append(pair_table(report, spans if request.zoomed else None))
    return shown or [overview(report, calls)]


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
    count = len(report.tokens)
    words = f"{count} token" + "s" * (count != 1)
    if count > report.prompt_tokens:
        words += f", from {report.prompt_tokens} on generated"
    return words


def layer_notes(report: AttentionReport) -> Iterator[str]:
    """What maps are that are no softmax: a sentence for each kind of layer."""
    alike: dict[str, list[LayerReport]] = {}
    for layer in report.layers:
        if layer.note:
            alike.setdefault(layer.note, []).append(layer)
    for note, layers in alike.items():
        kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
        yield f"{numbered('layer', [layer.layer for layer in layers])} ({kinds}): {note}"


def overview(report: AttentionReport, calls: Calls) -> RenderableType:
    """The map of all heads with the letters of their kinds, the heads found, and what is next."""
    metric = next(metric for metric in report.metrics if metric.name == COLOURED_BY)
    left = BY_REPEATS if calls.repeated else ()
    found = [head_map(report, metric, numbers=False), kinds_found(report, left)]
    hints = [_hint(*hint) for hint in _next(report, calls)]
    return Group(*found, *metric_notes(report), *hints)


def metric_map(
    report: AttentionReport, metric: Metric, kind: Kind, calls: Calls | None = None
) -> RenderableType:
    """The map of one metric with its values, and its definition; a sentence where it has none."""
    if all(math.isnan(head.metrics[metric.name]) for head in heads_of(report)):
        [why] = undefined_metrics(report, [metric])
        if calls is None or calls.repeated is None or metric.name not in BY_REPEATS:
            return Text(why)
        return Group(Text(why), _hint("try:", f"{calls.repeated} --map {metric.name}"))
    about = Line(definition(report, metric), FAINT)
    shown = head_map(report, metric, numbers=True, kind=kind)
    unknown = [Text(words, style=FAINT) for words in unknown_values(report, [metric])]
    return Group(shown, about, *unknown, *metric_notes(report))


def _hint(words: str, call: str) -> RenderableType:
    """Words and a command line, which is never wrapped, so that it can be copied."""

    def draw(width: int, ink: Ink) -> Iterator[RenderableType]:
        beside = cell_len(f"{words} {call}") <= width
        if not beside:
            yield Text(words, style=FAINT)
        line = f"{words} {call}" if beside else call
        yield Text(line, style=FAINT, no_wrap=True, overflow="ignore")

    return Fit(draw)


def _next(report: AttentionReport, calls: Calls) -> Iterator[tuple[str, str]]:
    """What to run next: repeated text where there is little, the clearest head."""
    rows = report.rows.get("induction", 0)
    if calls.repeated is not None and rows < FEW_ROWS:
        said = f"{counted(rows, 'row')} of repeated tokens only" if rows else (
            "no token comes twice"
        )
        yield f"induction, duplicate: {said}; try:", calls.repeated
    clearest = next(_clearest(report, repeated=calls.repeated is None), None)
    layer, head = report.layers[0].layer, report.layers[0].heads[0].head
    why = ""
    if clearest is not None:
        kind, layer, head = clearest
        why = f" ({kind})"
    yield f"head {layer}.{head}{why}:", f"{calls.same} --layer {layer} --head {head}"


def _clearest(report: AttentionReport, *, repeated: bool) -> Iterator[tuple[str, int, int]]:
    """(kind, layer, head): of every kind found the clearest head, unusual kinds first."""
    order = list(report.labels)
    if repeated:  # the text was made to show these
        order.sort(key=lambda label: label.name not in BY_REPEATS)
    order.sort(key=lambda label: label.name in COMMON)
    for label in order:
        found = [
            (head.metrics[label.metric], layer.layer, head.head)
            for layer in report.layers
            for head in layer.heads
            if label.name in head.labels
        ]
        if found:
            yield label.name, *max(found)[1:]


def heatmaps(report: AttentionReport, kind: Kind) -> RenderableType:
    """The matrices of the report, all on one scale: one with its tokens, several as panels."""
    scale = matrix_scale(report, kind)
    bar = ColourBar(_words(report), scale)
    if len(report.matrices) == 1:
        matrix = report.matrices[0]
        tokens = [one.text or f"id {one.id}" for one in report.tokens]
        words = _name(matrix, report)
        if _names_all(report):
            words += f", {_count(report)}"
        heading = Text(f"{words}, queries down, keys across", style=HEADING)
        given = report.prompt_tokens
        return Group(heading, Heatmap(matrix=matrix, tokens=tokens, scale=scale, given=given), bar)
    titles = [_title(matrix, report) for matrix in report.matrices]
    panels = Panels(
        matrices=report.matrices, titles=titles, scale=scale, given=report.prompt_tokens
    )
    return Group(panels, bar)


def matrix_scale(report: AttentionReport, kind: Kind) -> Scale:
    """The scale of all matrices: weights are 0 … 1 on every one.

    Scores, and weights with signs, are as far from zero as the largest of them.
    """
    if report.what == "scores" or any(matrix.signed for matrix in report.matrices):
        return Scale.around([matrix.values for matrix in report.matrices], kind)
    return Scale(low=0.0, high=1.0, kind=kind)


def is_single(report: AttentionReport) -> bool:
    """Whether the report is of one head."""
    return sum(1 for _ in heads_of(report)) == 1


def head_summary(report: AttentionReport, *, numbers: bool) -> RenderableType:
    """The kinds that the only head of the report is of; `numbers`: and what it measures."""
    [head] = heads_of(report)
    parts = list(_kinds(report, head))
    notes: list[RenderableType] = []
    if numbers:
        parts += _numbers(report, head)
        parts.append("all: --metrics all")
        notes = metric_notes(report)
    return Group(Line(parts), *notes)


def _kinds(report: AttentionReport, head: HeadReport) -> Iterator[str]:
    found = [label for label in report.labels if label.name in head.labels]
    if not found:
        yield "unclassified"
    for label in found:
        yield f"{label.name} ({short(head.metrics[label.metric], True)} ≥ {label.threshold:g})"
    if unclear := unclear_kinds(report):
        yield f"undetermined: {', '.join(unclear)}"


def _numbers(report: AttentionReport, head: HeadReport) -> Iterator[str]:
    """The metrics that say most, but for those of kinds, and those that it has no value of."""
    left = (*head.labels, *report.unlabelled)
    said = [label.metric for label in report.labels if label.name in left]
    names = [label.metric for label in report.labels if label.metric not in said]
    for metric in report.metrics:
        value = head.metrics[metric.name]
        if metric.name in (*names, *SPREAD, *LINEAR) and not math.isnan(value):
            yield f"{metric.name} {short(value, metric.high == 1.0)}"


def _words(report: AttentionReport) -> str:
    if report.what == "scores":
        return "scores: q·k before softmax"
    if any(matrix.signed for matrix in report.matrices):
        return "pattern: weights with their signs, around 0"
    return "pattern: each row sums to 1" + (" with its sink" * report.sinks)


def _name(matrix: Matrix, report: AttentionReport) -> str:
    kv = f", kv head {matrix.kv_head}" if shares(report) else ""
    kind = next(layer.kind for layer in report.layers if layer.layer == matrix.layer)
    return f"layer {matrix.layer} ({kind}), head {matrix.head}{kv}"


def _title(matrix: Matrix, report: AttentionReport) -> str:
    kv = f" kv {matrix.kv_head}" if shares(report) else ""
    return f"{matrix.layer}.{matrix.head}{kv}"
