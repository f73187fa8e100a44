"""What the heads of a model attend to, as one page of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.render.attention_map import head_map, kinds_found, shares
from llmcli.render.attention_tables import definition, token
from llmcli.render.checks import render_checks
from llmcli.render.heatmap import ColourBar, Heatmap, Panels
from llmcli.render.layout import Dotted
from llmcli.render.palette import Kind, Scale
from llmcli.render.theme import FAINT, HEADING, one_line
from llmcli.reports.attention import AttentionReport, Matrix, Metric

ENDS = 8  # tokens of a long prompt that are shown at each end
COLOURED_BY = "normalized_entropy"  # the map of kinds: from one token to all of them


def render_attention(
    report: AttentionReport, title: str, views: Sequence[RenderableType]
) -> RenderableType:
    """The model's line, the prompt, the views, and at the end the checks of what they show."""
    shown: list[RenderableType] = [Text(one_line(title), style=HEADING), _prompt(report)]
    for view in views:
        shown += [Text(), view]
    notes = [f"{name} was left out: {why}" for name, why in report.skipped]
    if report.weighted:
        notes.append("metrics of A[i,j] ‖v_j W_O‖, divided by its row's sum, instead of A[i,j]")
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


def overview(report: AttentionReport) -> RenderableType:
    """The map of all heads with the letters of their kinds, the heads found, and what is next."""
    metric = next(metric for metric in report.metrics if metric.name == COLOURED_BY)
    hint = Text("\n".join(_next(report)), style=FAINT)
    found = [head_map(report, metric, numbers=False), Text(), kinds_found(report)]
    return Group(*found, Text(), hint)


def metric_map(report: AttentionReport, metric: Metric, kind: Kind) -> RenderableType:
    """The map of one metric with its values, and its definition."""
    about = Dotted(definition(report, metric), FAINT)
    return Group(head_map(report, metric, numbers=True, kind=kind), about)


def _next(report: AttentionReport) -> Iterator[str]:
    """What to ask next: the clearest head of a kind, repeated text where there is none."""
    best = [
        (head.metrics[label.metric], layer.layer, head.head, label.name)
        for label in report.labels
        for layer in report.layers
        for head in layer.heads
        if label.name in head.labels and label.name not in ("sink", "local", "broad")
    ]
    bars = "; bars part heads that share keys and values" if shares(report) else ""
    yield f"a head is written layer.head{bars}"
    if best:
        _, layer, head, name = max(best)
        yield f"to see one ({name}): --layer {layer} --head {head}"
    else:
        yield "to see one: --layer 0 --head 0"
    half = len(report.tokens) // 2
    if report.tokens[-half:] != report.tokens[-2 * half : -half]:
        yield "for induction and duplicate heads: --synthetic 32, random tokens twice"


def heatmaps(report: AttentionReport, kind: Kind) -> RenderableType:
    """The matrices of the report, all on one scale: one with its tokens, several as panels.

    Weights are 0 … 1 on every scale; scores are as far from zero as the largest of them.
    """
    signed = report.what == "scores"
    values = [matrix.values for matrix in report.matrices]
    scale = Scale.around(values, kind) if signed else Scale(low=0.0, high=1.0, kind=kind)
    bar = ColourBar(_words(report), scale)
    if len(report.matrices) == 1:
        matrix = report.matrices[0]
        tokens = [text or f"id {id}" for id, text in report.tokens]
        heading = Text(_name(matrix, report), style=HEADING)
        return Group(heading, Heatmap(matrix=matrix, tokens=tokens, scale=scale), bar)
    titles = [_title(matrix, report) for matrix in report.matrices]
    panels = Panels(matrices=report.matrices, titles=titles, scale=scale)
    return Group(panels, bar)


def _words(report: AttentionReport) -> str:
    if report.what == "scores":
        return "scores: q·k as softmax takes them, in the same colours for every head"
    return "pattern: the weights of every query, 1 in all"


def _name(matrix: Matrix, report: AttentionReport) -> str:
    kv = f", keys and values of kv head {matrix.kv_head}" if shares(report) else ""
    kind = next(layer.kind for layer in report.layers if layer.layer == matrix.layer)
    return f"layer {matrix.layer} ({kind}), head {matrix.head}{kv}"


def _title(matrix: Matrix, report: AttentionReport) -> str:
    kv = f" kv {matrix.kv_head}" if shares(report) else ""
    return f"{matrix.layer}.{matrix.head}{kv}"
