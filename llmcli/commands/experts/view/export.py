"""Which experts tokens take, as a page."""

from __future__ import annotations

from typing import Any

from llmcli.commands.experts.report import ExpertsLayer, ExpertsReport
from llmcli.records.numbers import best_groups
from llmcli.ui.page.build import checks, finite, page, token

DIGITS = 4  # of a number in the page


def experts_page(report: ExpertsReport, title: str) -> bytes:
    """The whole report as one HTML file. `title` names the model."""
    data = {
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "tokens": [token(one) for one in report.tokens],
        "prompt_tokens": report.prompt_tokens,
        "positions": report.positions,
        "layers": [_layer(layer) for layer in report.layers],
        "checks": checks(report.checks),
    }
    return page("experts", f"Experts: {title}", data)


def _layer(layer: ExpertsLayer) -> dict[str, Any]:
    """`chosen` and `weights` position by position, one after the other."""
    shares = layer.shared_shares
    return {
        "layer": layer.layer,
        "experts": layer.experts,
        "per_token": layer.per_token,
        "about": about(layer),
        "load": layer.load,
        "balance": _short(layer.balance),
        "mean_weights": [_short(weight) for weight in layer.mean_weights],
        "chosen": layer.chosen.ravel().tolist(),
        "weights": [_short(weight) for weight in layer.weights.ravel().tolist()],
        "margins": [_short(margin) for margin in layer.margins.tolist()],
        "shared": None if shares is None else [_short(one) for one in shares.tolist()],
    }


def about(layer: ExpertsLayer) -> str:
    """How a layer's tokens choose, in words: `top 2 of 8 by softmax`."""
    words = f"top {layer.per_token} of {layer.experts} by {layer.scores}"
    words += " + correction" if layer.corrected else ""
    best = best_groups(layer.kept_groups, layer.groups, layer.group_best)
    return words + f", of {best}" * (layer.groups > 1)


def _short(value: float) -> float | None:
    return finite(float(f"{value:.{DIGITS}g}"))
