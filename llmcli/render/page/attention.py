"""Attention as a page: every head's matrix in 256 steps, explored by layer, head and token."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcli.render.page.build import checks, finite, page, token
from llmcli.render.palette import Kind
from llmcli.render.visible import visible, visible_count
from llmcli.reports.attention import AttentionReport, LayerReport, What

FRAME = 40 << 10  # bytes of a page without its heads
_STEPS = 255
PRECISION = {
    "pattern": "Weights w are kept here in 256 steps of √w: what is shown is off by at most "
    "√w/255, 0.004 where w is 1 and 0.0004 where it is 0.01. Numbers of heads are exact. "
    "For exact weights write a .safetensors or .npz file.",
    "scores": "Scores are kept here in 256 steps between a head's least and its largest. Numbers "
    "of heads are exact. For exact scores write a .safetensors or .npz file.",
}


class AttentionPage:
    """Collects the matrices of one layer after the other, a byte a cell, and makes the page."""

    def __init__(self, what: What) -> None:
        self._what: What = what
        self._layers: dict[int, tuple[int | None, list[dict[str, Any]]]] = {}

    def add(self, layer: int, values: np.ndarray, window: int | None = None) -> None:
        """All chosen heads of a layer, `[H, T, T]`; with a `window` a query sees so many keys.

        What is masked is not kept.
        """
        seen = visible(values.shape[-1], window)
        heads = [_kept(matrix[seen], self._what) for matrix in values]
        self._layers[layer] = window, heads

    def html(self, report: AttentionReport, title: str, *, kind: Kind = "linear") -> bytes:
        """The page of the report whose matrices were added. `title` names the model.

        `kind`: the scale it begins with.
        """
        kept = [heads for _, heads in self._layers.values()]
        ends = [abs(head[end]) for heads in kept for head in heads for end in ("low", "high")]
        what = "Attention scores" if self._what == "scores" else "Attention"
        data = {
            "heading": what,
            "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
            "signed": self._what == "scores",
            "most": max(ends, default=1.0) or 1.0,
            "bend": kind,
            "precision": PRECISION[self._what],
            "tokens": [token(*one) for one in report.tokens],
            "prompt_tokens": report.prompt_tokens,
            "metrics": [vars(metric) for metric in report.metrics],
            "labels": [vars(label) for label in report.labels],
            "layers": [self._layer(layer) for layer in report.layers],
            "checks": checks(report.checks),
        }
        blocks = [
            (f"cells-{row}-{column}", head["cells"])
            for row, layer in enumerate(report.layers)
            for column, head in enumerate(self._layers[layer.layer][1])
        ]
        return page("attention", f"{what}: {title}", data, blocks)

    def _layer(self, layer: LayerReport) -> dict[str, Any]:
        window, kept = self._layers[layer.layer]
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
        return {**about, "window": window, "heads": heads}


def page_size(tokens: int, windows: Sequence[int | None], heads: int, metrics: int) -> int:
    """Bytes of the page, to within a tenth: a window (None: all) for each layer.

    `heads` of every layer are in it, each with so many `metrics`.
    """
    cells = sum(visible_count(tokens, window) for window in windows)
    each = 150 + 36 * metrics
    return FRAME + tokens * 26 + len(windows) * heads * each + -(-cells * heads * 4 // 3)


def _kept(values: np.ndarray, what: What) -> dict[str, Any]:
    """The visible cells of one head in 256 steps, with what the first and the last step mean."""
    if what == "pattern":
        low, high = 0.0, 1.0
        shares = np.sqrt(values.clip(0, 1))
    else:
        low, high = float(values.min()), float(values.max())
        shares = (values - low) / ((high - low) or 1.0)
    steps = (shares * _STEPS).round().astype(np.uint8)
    return {"low": low, "high": high, "cells": base64.b64encode(steps.tobytes()).decode()}
