"""The logit lens as a page with every cell in full."""

from __future__ import annotations

import math
from typing import Any

from llmcli.commands.lens.report import EMBEDDING, LensCell, LensReport, LensRow, short_name
from llmcli.ui.page.build import checks, finite, page, token
from llmcli.ui.theme import quoted

DIGITS = 6  # of a number in the page


def lens_page(report: LensReport, title: str) -> bytes:
    """The whole report as one HTML file. `title` names the model."""
    texts = {one.id: one.text for row in report.rows for cell in row.cells for one in cell.top}
    texts |= {target.id: target.text for target in report.targets}
    divergences = [cell.kl for row in report.rows for cell in row.cells if math.isfinite(cell.kl)]
    data = {
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "vocabulary": report.vocabulary,
        "tokens": [token(one) for one in report.tokens],
        "prompt_tokens": report.prompt_tokens,
        "positions": report.positions,
        "target": report.target,
        "targets": [{"id": one.id} for one in report.targets],
        "texts": {id: quoted(text)[1:-1] for id, text in texts.items()},
        "rows": [_row(row) for row in report.rows],
        "settled": [short_name(name, embedding=EMBEDDING) for name in report.settled],
        "most_kl": max(divergences, default=0.0),
        "checks": checks(report.checks),
    }
    return page("lens", f"Logit lens: {title}", data)


def _row(row: LensRow) -> dict[str, Any]:
    """`name` is short: `embedding`, `3`, `3 mid`."""
    cells = [_cell(cell) for cell in row.cells]
    return {
        "name": short_name(row.name, embedding=EMBEDDING),
        "full": row.name,
        "layer": row.layer,
        "cells": cells,
    }


def _cell(cell: LensCell) -> list[float | int | None]:
    """Entropy, KL, rank and probability of the target, then the likeliest tokens in pairs."""
    first = [_short(cell.entropy), _short(cell.kl), cell.target_rank]
    pairs = [part for one in cell.top for part in (one.id, _short(one.probability))]
    return [*first, _short(cell.target_probability), *pairs]


def _short(value: float) -> float | None:
    return finite(float(f"{value:.{DIGITS}g}"))
