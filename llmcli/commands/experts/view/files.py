"""Which experts tokens take, as a page and as a PNG for a paper."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmcli.commands.experts.report import ExpertsLayer, ExpertsReport
from llmcli.commands.experts.view import share, weight_scale
from llmcli.records.numbers import best_groups
from llmcli.ui import png
from llmcli.ui.page.build import checks, finite, page, token

BETWEEN = 90  # pixels between the choices and the load
LEFT = png.MARGIN + 70  # where boxes begin: behind the numbers of layers
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
        "balance": finite(layer.balance, DIGITS),
        "mean_weights": [finite(weight, DIGITS) for weight in layer.mean_weights],
        "chosen": layer.chosen.ravel().tolist(),
        "weights": [finite(weight, DIGITS) for weight in layer.weights.ravel().tolist()],
        "margins": [finite(margin, DIGITS) for margin in layer.margins.tolist()],
        "shared": None if shares is None else [finite(one, DIGITS) for one in shares.tolist()],
    }


def about(layer: ExpertsLayer) -> str:
    """How a layer's tokens choose, in words: `top 2 of 8 by softmax`."""
    words = f"top {layer.per_token} of {layer.experts} by {layer.scores}"
    words += " + correction" if layer.corrected else ""
    best = best_groups(layer.kept_groups, layer.groups, layer.group_best)
    return words + f", of {best}" * (layer.groups > 1)


def experts_png(report: ExpertsReport, title: str) -> bytes:
    """The last positions with their experts, coloured by weight; below, what each expert was
    chosen by all positions. `title` names the model.
    """
    first = max(0, len(report.positions) - png.MOST_TOKENS)
    positions, layers = report.positions[first:], report.layers
    scale = weight_scale(report)
    digits = round(png.width(str(max(layer.experts for layer in layers) - 1), png.LEAST)) + 10
    most = max(layer.per_token for layer in layers)
    bar = png.bar_width(scale, png.SMALL) + 40
    room = (png.WIDE - LEFT - png.MARGIN - bar) // len(positions) - png.BOX_GAP
    named = max(1, min(most, max(room, 60) // digits))

    def cell(row: int, column: int) -> list[tuple[float, str]]:
        layer, at = layers[row], first + column
        places = scale.fractions(layer.weights[at, :named]).tolist()
        return list(zip(places, map(str, layer.chosen[at, :named].tolist()), strict=True))

    grid = png.TokenGrid(
        left=LEFT, across=max(60, named * digits) + png.BOX_GAP, columns=len(positions),
        names=[str(layer.layer) for layer in layers], cell=cell, positions=positions,
        tokens=[report.tokens[position] for position in positions],
        written=report.from_prompt - first or -1,
    )  # fmt: skip
    width = max(png.NARROW, grid.right + bar + png.MARGIN)
    load = _load_grid(report, grid.bottom + BETWEEN, width)
    sheet = png.Sheet(width, load.bottom + 40 + png.FOOT)
    sheet.headings("Experts: which ones each token takes in every layer", title)
    grid.draw(sheet)
    height = max(150, len(layers) * png.ROW - png.BOX_GAP)
    sheet.colour_bar((grid.right + 30, png.TOP), height, scale, png.SMALL)
    words = f"load: how many of {len(report.positions)} tokens take each expert"
    sheet.text((LEFT, load.top - 44), words, png.FINE, png.INK, "ls")
    load.draw(sheet)
    load.numbers(sheet, range(load.columns), png.TINY)
    words = "numbers: the experts chosen, the largest score first, coloured by what they count"
    if named < most:
        words += f"; the first {named} of {most}"
    if first:
        words += f"; above the last {len(positions)} of {len(report.positions)} positions"
    sheet.footer(f"{words}; {about(layers[0])}", report.ok)
    return sheet.png()


def _load_grid(report: ExpertsReport, top: int, width: int) -> png.BoxGrid:
    """Layers down, experts across: the share of the tokens that take each, up to the most."""
    most = max(layer.experts for layer in report.layers)
    across = max(6, min(96, (width - LEFT - png.MARGIN) // most))
    shares = [np.array(layer.load) / len(layer.chosen) for layer in report.layers]

    def cell(row: int, column: int) -> list[tuple[float, str]]:
        if column >= len(shares[row]):
            return []
        part = float(shares[row][column])
        words = share(part) if across >= 64 else ""
        return [(part / (float(shares[row].max()) or 1.0), words)]

    return png.BoxGrid(
        left=LEFT, top=top, across=across, gap=1, columns=most, cell=cell,
        names=[str(layer.layer) for layer in report.layers],
    )
