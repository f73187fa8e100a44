"""The logit lens as a table for other programs: a line for every token of every cell."""

from __future__ import annotations

import csv
import io

from llmcli.commands.lens.report import LensReport
from llmcli.ui.theme import encodable

COLUMNS = (
    "row", "layer", "position", "position_token", "generated", "place", "id", "token",
    "probability", "entropy", "kl", "target_id", "target_rank", "target_probability",
)  # fmt: skip


def lens_csv(report: LensReport) -> bytes:
    """UTF-8, a heading and a line each; `place` is 1 for the likeliest token of a cell.

    `generated` is 1 for a position whose token the model wrote. The embedding has no layer.
    Numbers have all the digits that they have.
    """
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for row in report.rows:
        for at, cell in enumerate(row.cells):
            position, target = report.positions[at], report.targets[at]
            written = int(position >= report.prompt_tokens)
            for place, token in enumerate(cell.top, 1):
                writer.writerow((
                    row.name, row.layer, position, report.tokens[position][1], written, place,
                    token.id, token.text, token.probability, cell.entropy, cell.kl, target.id,
                    cell.target_rank, cell.target_probability,
                ))  # fmt: skip
    return encodable(file.getvalue()).encode()
