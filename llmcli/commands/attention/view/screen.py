"""What the heads of a model attend to, as one page of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.attention.report.heads import AttentionReport, LayerReport, Metric
from llmcli.commands.attention.view.map import head_map, kinds_found, shares
from llmcli.commands.attention.view.tables import definition, token, unknown_values, weighted_note
from llmcli.reports.matrix import Matrix
from llmcli.reports.numbers import spans
from llmcli.ui.checks import render_checks
from llmcli.ui.heatmap import ColourBar, Heatmap, Panels
from llmcli.ui.layout import Dotted
from llmcli.ui.palette import Kind, Scale
from llmcli.ui.theme import FAINT, HEADING, one_line

ENDS = 8  # tokens of a long prompt that are shown at each end
MOST_NEXT = 3  # heads that are proposed
FEW_ROWS = 32  # of repeated tokens: as many as `--synthetic 32` has
TOLD_BY_REPEATS = ("induction", "duplicate")
COMMON = ("sink", "local", "broad")  # kinds that many heads are of
COLOURED_BY = "normalized_entropy"  # the map of kinds: from one token to all of them


def render_attention(
    report: AttentionReport, title: str, views: Sequence[RenderableType]
) -> RenderableType:
    """The model's line, the prompt, the views, and at the end the checks of what they show."""
    shown: list[RenderableType] = [Text(one_line(title), style=HEADING), _prompt(report)]
    for view in views:
        shown += [Text(), view]
    notes = [f"{name} was left out: {why}" for name, why in report.skipped]
    if shown_notes := list(layer_notes(report)):
        shown += [Text(), *(Text(note, style=FAINT) for note in shown_notes)]
    shown += [Text(note, style=FAINT) for note in notes]
    return Group(*shown, Text(), render_checks(report.checks))


def _prompt(report: AttentionReport) -> RenderableType:
    count = len(report.tokens)
    shown = [token(report, at) for at in range(count)]
    if count > 2 * ENDS:
        shown = [*shown[:ENDS], f"… {count - 2 * ENDS} more", *shown[-ENDS:]]
    words = f"{count} token" + ("s" if count > 1 else "")
    if count > report.prompt_tokens:
        words += f", from {report.prompt_tokens} on generated"
    return Dotted([words, *shown], FAINT)


def layer_notes(report: AttentionReport) -> Iterator[str]:
    """What maps are that are no softmax: a sentence for each kind of layer."""
    alike: dict[str, list[LayerReport]] = {}
    for layer in report.layers:
        if layer.note:
            alike.setdefault(layer.note, []).append(layer)
    for note, layers in alike.items():
        kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
        numbers = spans([layer.layer for layer in layers])
        yield f"layer{'s' * (len(layers) > 1)} {numbers} ({kinds}): {note}"


@dataclass(frozen=True)
class Calls:
    """Command lines that hints begin with: the `same` run, and one over `repeated` tokens.

    `repeated` is None where tokens are repeated already.
    """

    same: str
    repeated: str | None


def overview(report: AttentionReport, calls: Calls) -> RenderableType:
    """The map of all heads with the letters of their kinds, the heads found, and what is next."""
    metric = next(metric for metric in report.metrics if metric.name == COLOURED_BY)
    hint = Text("\n".join(_next(report, calls)), style=FAINT)
    found = [head_map(report, metric, numbers=False), Text(), kinds_found(report)]
    return Group(*found, *weighted_note(report), Text(), hint)


def metric_map(report: AttentionReport, metric: Metric, kind: Kind) -> RenderableType:
    """The map of one metric with its values, and its definition."""
    about = Dotted(definition(report, metric), FAINT)
    shown = head_map(report, metric, numbers=True, kind=kind)
    unknown = [Text(words, style=FAINT) for words in unknown_values(report, [metric])]
    return Group(shown, about, *unknown, *weighted_note(report))


def _next(report: AttentionReport, calls: Calls) -> Iterator[str]:
    """What to ask next: the clearest heads of some kinds, repeated text where there is little."""
    bars = "; bars part heads that share keys and values" if shares(report) else ""
    yield f"a head is written layer.head{bars}"
    clearest = list(_clearest(report, repeated=calls.repeated is None))
    for name, layer, head in clearest[:MOST_NEXT]:
        yield f"to see one ({name}): {calls.same} --layer {layer} --head {head}"
    if not clearest:
        layer, head = report.layers[0].layer, report.layers[0].heads[0].head
        yield f"to see one: {calls.same} --layer {layer} --head {head}"
    rows = report.rows.get("induction", 0)
    if calls.repeated is not None and rows < FEW_ROWS:
        told = f"told from {rows} row{'s' * (rows != 1)} of repeated tokens only"
        told = told if rows else "no token of this text comes again"
        yield f"induction and duplicate heads: {told}; for more: {calls.repeated}"


def _clearest(report: AttentionReport, *, repeated: bool) -> Iterator[tuple[str, int, int]]:
    """(kind, layer, head): of every kind found the clearest head, telling kinds first."""
    order = list(report.labels)
    if repeated:  # such a text is there to show these
        order.sort(key=lambda label: label.name not in TOLD_BY_REPEATS)
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
    bar = Group(ColourBar(_words(report), scale), *_not_weighted(report))
    if len(report.matrices) == 1:
        matrix = report.matrices[0]
        tokens = [text or f"id {id}" for id, text in report.tokens]
        heading = Text(_name(matrix, report), style=HEADING)
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


def _not_weighted(report: AttentionReport) -> list[RenderableType]:
    """`--weighted` changes metrics and the order of pairs, not what a matrix holds."""
    held = "its scores" if report.what == "scores" else "A[i,j] itself"
    words = f"a heatmap is of {held}: --weighted is about metrics and pairs"
    return [Text(words, style=FAINT)] if report.weighted else []


def _words(report: AttentionReport) -> str:
    if report.what == "scores":
        return "scores: q·k as softmax takes them, in the same colours for every head"
    if any(matrix.signed for matrix in report.matrices):
        return "pattern: weights with their signs, around 0, in the same colours for every head"
    return "pattern: the weights of every query, 1 in all" + (", with its sink" * report.sinks)


def _name(matrix: Matrix, report: AttentionReport) -> str:
    kv = f", keys and values of kv head {matrix.kv_head}" if shares(report) else ""
    kind = next(layer.kind for layer in report.layers if layer.layer == matrix.layer)
    return f"layer {matrix.layer} ({kind}), head {matrix.head}{kv}"


def _title(matrix: Matrix, report: AttentionReport) -> str:
    kv = f" kv {matrix.kv_head}" if shares(report) else ""
    return f"{matrix.layer}.{matrix.head}{kv}"
