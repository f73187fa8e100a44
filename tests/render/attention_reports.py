"""A report of attention for the tests of what is drawn from it, made by hand."""

from __future__ import annotations

import math

import numpy as np

from llmcli.commands.attention.report import AttentionReport, HeadReport, LayerReport, Pair
from llmcli.records import attention
from llmcli.records.attention import Matrix
from llmcli.records.document import ViewCheck
from llmcli.records.text import Token

NAMES = ("normalized_entropy", "effective_keys", "previous_token", "induction")
METRICS = tuple(metric for metric in attention.METRICS if metric.name in NAMES)
LABELS = tuple(label for label in attention.LABELS if label.metric in NAMES)
GOOD = ViewCheck(name="row_sums", words="every row sums to 1", value=2e-7, tolerance=1e-5)
BAD = ViewCheck(
    name="values", words="pattern @ values = z", value=0.5, tolerance=1e-5, where="layer 1, head 2"
)


def pattern(tokens, *, window=None):
    """A causal pattern `[T, T]`, NaN where masked: half to the first key, half to the last."""
    values = np.full((tokens, tokens), np.nan, np.float32)
    for row in range(tokens):
        first = 0 if window is None else max(0, row + 1 - window)
        values[row, first : row + 1] = 0.0
        values[row, first] += 0.5
        values[row, row] += 0.5
    return values


def matrix(values, *, layer=0, head=0, kv_head=0, queries=None, keys=None, pool=1):
    rows, columns = values.shape
    return Matrix(
        layer=layer, head=head, kv_head=kv_head, queries=queries or (0, rows * pool),
        keys=keys or (0, columns * pool), pool=pool, values=np.asarray(values, np.float32),
    )  # fmt: skip


def head(number, kv_head=None, labels=(), **metrics):
    """A head whose metrics are all 0.1 but those that are given."""
    values = {metric.name: max(metric.low, 0.1) for metric in METRICS} | metrics
    return HeadReport(
        head=number, kv_head=number if kv_head is None else kv_head, metrics=values,
        labels=tuple(labels),
    )  # fmt: skip


def grouped_layers(layers=3, heads=4, group=2, kind="full"):
    """Layers of plain heads; head 1 of layer 1 looks at the token before, 2.0 has no induction."""
    found = []
    for layer in range(layers):
        row = [head(number, number // group) for number in range(heads)]
        if layer == 1:
            row[1] = head(1, 1 // group, ("previous-token",), previous_token=0.93)
        if layer == 2:
            row[0] = head(
                0, 0, ("previous-token", "broad"), previous_token=0.5, normalized_entropy=0.9,
                effective_keys=12.5, induction=math.nan,
            )  # fmt: skip
        found.append(LayerReport(layer=layer, kind=kind, kv_heads=heads // group, heads=tuple(row)))
    return tuple(found)


def report(texts=("a", " b", " c"), **changed):
    """A report over tokens of those texts; `changed`: other values of its fields."""
    tokens = tuple(Token(id=id, text=text) for id, text in enumerate(texts, start=10))
    values = {
        "what": "pattern", "dtype": "float32", "tokens": tokens,
        "prompt_tokens": len(texts), "metrics": METRICS,
        "rows": {metric.name: len(texts) for metric in METRICS}, "labels": LABELS,
        "layers": grouped_layers(), "matrices": (), "pairs": (), "checks": (GOOD,),
        "part": ((0, len(texts)),) * 2,
    }  # fmt: skip
    return AttentionReport(**(values | changed))


def pair(query, key, weight=0.75, rank_value=None, layer=1, head=2):
    return Pair(
        layer=layer, head=head, kv_head=head // 2, query=query, key=key, weight=weight,
        rank_value=weight if rank_value is None else rank_value,
    )  # fmt: skip
