"""The logit lens for other programs: a page with every cell in full, and a table."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

from llmcli.commands.lens.report import LensCell, LensReport, LensRow
from llmcli.ui.page.build import checks, finite, page, token
from llmcli.ui.theme import csv_cell, quoted
from llmcli.ui.token_text import EMBEDDING, short

DIGITS = 6  # of a number in the page
COLUMNS = (
    "row", "layer", "position", "position_token", "generated", "place", "id", "token",
    "probability", "entropy", "kl", "target_id", "target_rank", "target_probability",
)  # fmt: skip


def lens_page(report: LensReport, title: str) -> bytes:
    """The whole report as one HTML file. `title` names the model."""
    texts = {one.id: one.text for row in report.rows for cell in row.cells for one in cell.top}
    texts |= {target.id: target.text for target in report.targets}
    divergences = [cell.kl for row in report.rows for cell in row.cells if math.isfinite(cell.kl)]
    data = {
        "title": f"{title} · {len(report.tokens)} tokens · {report.dtype}",
        "vocabulary": report.vocabulary,
        "tokens": [token(*one) for one in report.tokens],
        "prompt_tokens": report.prompt_tokens,
        "positions": report.positions,
        "target": report.target,
        "targets": [{"id": one.id} for one in report.targets],
        "texts": {id: quoted(text)[1:-1] for id, text in texts.items()},
        "rows": [_row(row) for row in report.rows],
        "settled": [short(name, embedding=EMBEDDING) for name in report.settled],
        "most_kl": max(divergences, default=0.0),
        "checks": checks(report.checks),
    }
    return page("lens", f"Logit lens: {title}", data)


def lens_page_size(rows: int, positions: int, top: int) -> int:
    """Bytes of the page, roughly: a cell has four numbers and a pair for each of `top` tokens."""
    return (29 << 10) + rows * positions * (31 + 16 * top)


def _row(row: LensRow) -> dict[str, Any]:
    """`name` is short: `embedding`, `3`, `3 mid`."""
    cells = [_cell(cell) for cell in row.cells]
    return {
        "name": short(row.name, embedding=EMBEDDING),
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


def lens_csv(report: LensReport) -> bytes:
    """UTF-8, a heading and a line each; `place` is 1 for the likeliest token of a cell.

    `generated` is 1 for a position whose token the model wrote. The embedding has no layer.
    Numbers have all the digits that they have. Tokens are as `csv_cell` writes them.
    """
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for row in report.rows:
        for at, cell in enumerate(row.cells):
            position, target = report.positions[at], report.targets[at]
            written = int(position >= report.prompt_tokens)
            for place, one in enumerate(cell.top, 1):
                writer.writerow((
                    row.name, row.layer, position, csv_cell(report.tokens[position][1]), written,
                    place, one.id, csv_cell(one.text), one.probability, cell.entropy, cell.kl,
                    target.id, cell.target_rank, cell.target_probability,
                ))  # fmt: skip
    return file.getvalue().encode()
