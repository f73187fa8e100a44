"""Which experts tokens take, in files: a table for other programs, and a page."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

from llmcli.commands.experts.report import ExpertsLayer, ExpertsReport
from llmcli.records.numbers import best_groups
from llmcli.ui.page.build import checks, finite, page, token
from llmcli.ui.theme import csv_cell

COLUMNS = (
    "layer", "position", "token", "generated", "place", "expert", "weight", "margin",
    "shared_share",
)  # fmt: skip
DIGITS = 4  # of a number in the page


def experts_csv(report: ExpertsReport, title: str) -> bytes:
    """UTF-8, a heading and a line for every choice; `place` is 1 for the largest score.

    `generated` is 1 for a position whose token the model wrote; what is not there is empty.
    Tokens are as `csv_cell` writes them.
    """
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for layer in report.layers:
        margins, shares = layer.margins.tolist(), _shares(layer)
        for at, position in enumerate(report.positions):
            pairs = zip(layer.chosen[at].tolist(), layer.weights[at].tolist(), strict=True)
            margin = "" if math.isnan(margins[at]) else margins[at]
            written = int(position >= report.prompt_tokens)
            for place, (expert, weight) in enumerate(pairs, 1):
                writer.writerow((
                    layer.layer, position, csv_cell(report.tokens[position][1]), written, place,
                    expert, weight, margin, shares[at],
                ))  # fmt: skip
    return file.getvalue().encode()


def experts_page(report: ExpertsReport, title: str) -> bytes:
    """The whole report as one HTML file. `title` names the model."""
    data = {
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "tokens": [token(*one) for one in report.tokens],
        "prompt_tokens": report.prompt_tokens,
        "positions": report.positions,
        "layers": [_layer(layer) for layer in report.layers],
        "checks": checks(report.checks),
    }
    return page("experts", f"Experts: {title}", data)


def _layer(layer: ExpertsLayer) -> dict[str, Any]:
    """`chosen` and `weights` position by position, one after the other."""
    shares = _shares(layer)
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
        "shared": None if layer.shared_shares is None else [_short(one) for one in shares],
    }


def about(layer: ExpertsLayer) -> str:
    """How a layer's tokens choose, in words: `top 2 of 8 by softmax`."""
    words = f"top {layer.per_token} of {layer.experts} by {layer.scores}"
    words += " + correction" if layer.corrected else ""
    best = best_groups(layer.kept_groups, layer.groups, layer.group_best)
    return words + f", of {best}" * (layer.groups > 1)


def _shares(layer: ExpertsLayer) -> list[Any]:
    if layer.shared_shares is None:
        return [""] * len(layer.chosen)
    return list(layer.shared_shares.tolist())


def _short(value: float) -> float | None:
    return finite(float(f"{value:.{DIGITS}g}"))
