"""Attention as a page to explore heads on.

It collects the matrices of one layer after the other, and is written when all is known.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.commands.attention.report import AttentionReport, LayerReport
from llmcli.records.attention import What
from llmcli.ui.page import checks, finite, page, token
from llmcli.ui.palette import Kind

FRAME = 40 << 10  # bytes of a page without its heads
PRECISION = {
    "pattern": "Weights w are kept here in 256 steps of √w: what is shown is off by at most "
    "√w/255, 0.004 where w is 1 and 0.0004 where it is 0.01. Numbers of heads are exact. "
    "For exact weights write a .safetensors or .npz file.",
    "signed": "Weights w with signs are kept in 255 steps of √|w|, up to the head's largest; their "
    "colours go from 0 both ways, as far as the largest of all. ",
    "scores": "Scores are kept here in 256 steps between a head's smallest and largest. Numbers "
    "of heads are exact. For exact scores write a .safetensors or .npz file.",
}


def visible(tokens: int, window: int | None) -> np.ndarray:
    """`[T, T]` of bool, queries down; a `window` of W has the query itself in it."""
    query, key = np.arange(tokens)[:, None], np.arange(tokens)
    seen: np.ndarray = key <= query
    return seen if window is None else seen & (query - key < window)


def visible_count(tokens: int, window: int | None) -> int:
    """How many cells of a matrix are not masked."""
    inside = tokens if window is None else min(tokens, window)
    return inside * (inside + 1) // 2 + (tokens - inside) * inside


class AttentionPage:
    """Every head's matrix, a byte a cell."""

    def __init__(self, what: What) -> None:
        self._what: What = what
        # by layer: its window, how its numbers are kept, and its heads
        self._layers: dict[int, tuple[int | None, str, list[dict[str, Any]]]] = {}

    def add(
        self, layer: int, values: np.ndarray, window: int | None = None, *, signed: bool = False
    ) -> None:
        """All chosen heads of a layer, `[H, T, T]`; with a `window` a query sees so many keys.

        What is masked is not kept. `signed`: weights with signs.
        """
        seen = visible(values.shape[-1], window)
        kind = "scores" if self._what == "scores" else "signed" if signed else "plain"
        self._layers[layer] = window, kind, [_packed(kind, matrix[seen]) for matrix in values]

    def html(self, report: AttentionReport, title: str, *, kind: Kind = "linear") -> bytes:
        """The page of the report whose matrices were added. `title` names the model.

        `kind`: the scale it begins with.
        """
        kept = [self._layers[layer.layer] for layer in report.layers]
        ends = [
            abs(head[end]) for _, values, heads in kept if values != "plain"
            for head in heads for end in ("low", "high")
        ]  # fmt: skip
        what = "Attention scores" if self._what == "scores" else "Attention"
        data = {
            "heading": what,
            "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
            "what": self._what,
            "most": max(ends, default=1.0) or 1.0,
            "bend": kind,
            "precision": PRECISION["signed"] * report.signed + PRECISION[self._what],
            "tokens": [token(one) for one in report.tokens],
            "prompt_tokens": report.prompt_tokens,
            "metrics": [vars(metric) for metric in report.metrics],
            "labels": [vars(label) for label in report.labels],
            "layers": [self._layer(layer) for layer in report.layers],
            "checks": checks(report.checks),
        }
        blocks = [
            (f"cells-{row}-{column}", head["cells"])
            for row, (_, _, heads) in enumerate(kept) for column, head in enumerate(heads)
        ]  # fmt: skip
        return page("attention", f"{what}: {title}", data, blocks)

    def _layer(self, layer: LayerReport) -> dict[str, Any]:
        window, values, kept = self._layers[layer.layer]
        heads = [
            {
                "head": head.head,
                "kv_head": head.kv_head,
                "labels": head.labels,
                "metrics": {name: finite(value) for name, value in head.metrics.items()},
                "low": matrix["low"],
                "high": matrix["high"],
            }
            for head, matrix in zip(layer.heads, kept, strict=True)
        ]
        about = {"layer": layer.layer, "kind": layer.kind, "kv_heads": layer.kv_heads}
        return {**about, "values": values, "note": layer.note, "window": window, "heads": heads}


def page_size(tokens: int, windows: Sequence[int | None], heads: int, metrics: int) -> int:
    """Bytes of the page, to within a tenth: a window (None: all) for each layer.

    `heads` of every layer are in it, each with so many `metrics`.
    """
    cells = sum(visible_count(tokens, window) for window in windows)
    each = 150 + 36 * metrics
    return FRAME + tokens * 26 + len(windows) * heads * each + -(-cells * heads * 4 // 3)


def _packed(kind: str, values: np.ndarray) -> dict[str, Any]:
    """The visible cells of one head in steps, with what the first and the last step mean.

    Weights in 256 steps of their roots, scores in 256 even steps from the smallest to the largest,
    signed weights in 255 steps of their roots: step 127 is 0.
    """
    low, high = 0.0, 1.0
    if kind == "scores":
        low, high = float(values.min()), float(values.max())
        steps = (values - low) / ((high - low) or 1.0) * 255
    elif kind == "signed":
        high = float(np.abs(values).max())
        low = -high
        steps = 127 + np.sign(values) * np.sqrt(np.abs(values) / (high or 1.0)) * 127
    else:
        steps = np.sqrt(values.clip(0, 1)) * 255
    cells = base64.b64encode(steps.round().astype(np.uint8).tobytes()).decode()
    return {"low": low, "high": high, "cells": cells}
