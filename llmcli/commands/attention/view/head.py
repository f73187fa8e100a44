"""One head looked at closely: its kinds and the numbers that tell most, below its heatmap."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.attention.report.heads import AttentionReport, HeadReport
from llmcli.commands.attention.report.metrics import LINEAR
from llmcli.commands.attention.view.map import short
from llmcli.commands.attention.view.tables import weighted_note
from llmcli.ui.layout import Dotted
from llmcli.ui.theme import FAINT

SPREAD = ("effective_keys", "max_weight", "distance")  # shown besides what kinds are told by


def is_single(report: AttentionReport) -> bool:
    """Whether the report is of one head."""
    return sum(len(layer.heads) for layer in report.layers) == 1


def head_kinds(report: AttentionReport) -> RenderableType:
    """What kinds the only head of the report is of, and by which numbers."""
    return Dotted(list(_kinds(report, _only(report))))


def head_numbers(report: AttentionReport) -> RenderableType:
    """The metrics of the only head that tell most, and where to find them all."""
    hint = Text("`--metrics all` lists every metric with its definition", style=FAINT)
    numbers = Dotted(list(_numbers(report, _only(report))))
    return Group(numbers, *weighted_note(report), hint)


def _only(report: AttentionReport) -> HeadReport:
    [head] = [head for layer in report.layers for head in layer.heads]
    return head


def _kinds(report: AttentionReport, head: HeadReport) -> Iterator[str]:
    found = [label for label in report.labels if label.name in head.labels]
    yield "kinds" if found else "of no kind"
    for label in found:
        value = short(head.metrics[label.metric], True)
        yield f"{label.name} ({label.metric} {value} ≥ {label.threshold:g})"
    for name, why in report.unlabelled:
        yield f"not told: {name}, {why}"


def _numbers(report: AttentionReport, head: HeadReport) -> Iterator[str]:
    names = [label.metric for label in report.labels]
    for metric in report.metrics:
        if metric.name in LINEAR and math.isnan(head.metrics[metric.name]):
            continue  # it has none
        if metric.name in (*names, *SPREAD, *LINEAR):
            value = head.metrics[metric.name]
            shown = "undefined" if math.isnan(value) else short(value, metric.high == 1.0)
            yield f"{metric.name} {shown}"
