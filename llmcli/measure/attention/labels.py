"""Kinds of heads, told by one metric each."""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmcli.reports.attention import Label

_ARENA = "a convention (ARENA's course): no theory sets it"
_OURS = "llmcli's own choice"

LABELS: tuple[Label, ...] = (
    Label(name="previous-token", letter="p", metric="previous_token", threshold=0.4, source=_ARENA),
    Label(name="induction", letter="i", metric="induction", threshold=0.4, source=_ARENA),
    Label(name="duplicate", letter="d", metric="duplicate", threshold=0.4, source=_ARENA),
    Label(
        name="sink",
        letter="s",
        metric="sink_rate",
        threshold=0.3,
        source="ε of Gu et al. 2025 (arXiv 2410.10781)",
    ),
    Label(name="local", letter="l", metric="locality_8", threshold=0.9, source=_OURS),
    Label(name="broad", letter="b", metric="normalized_entropy", threshold=0.8, source=_OURS),
)


def labels_of(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """The kinds of a head with those metrics; a metric that is NaN tells none."""
    return tuple(
        label.name
        for label in LABELS
        if not math.isnan(metrics[label.metric]) and metrics[label.metric] >= label.threshold
    )
