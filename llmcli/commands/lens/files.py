"""The files of `llmcli lens`: which there are, how large they get, and writing one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.cli.files import check_size
from llmcli.cli.output import write_document, write_file
from llmcli.commands.lens.report import LensReport

FILES = ("html", "png", "json", "csv")

# bytes, measured on ordinary texts: of one of the likeliest tokens of a cell, and of what the
# cell has besides; of the heading, and what a JSON document says of the model
_CSV, _JSON, _JSON_CELL = 127, 65, 142
_CSV_HEADING, _JSON_HEADING = 150, 2450


def check_lens_size(
    file: str, kind: str, rows: int, positions: int, top: int, *, force: bool
) -> None:
    """Refuses, before anything is computed, a file that gets too large.

    Raises UsageError and WriteFailed as `check_size` does. A picture has a bounded size.
    """
    from llmcli.commands.lens.view.page import lens_page_size

    cells = rows * positions
    sizes = {
        "html": lens_page_size(rows, positions, top),
        "json": _JSON_HEADING + cells * (_JSON_CELL + top * _JSON),
        "csv": _CSV_HEADING + cells * top * _CSV,
    }
    smaller = "choose fewer positions with `--position` or layers with `--layer`"
    check_size(file, sizes.get(kind, 0), force=force, smaller=smaller)


def write_lens(
    file: str, kind: str, report: LensReport, title: str, document: Mapping[str, Any]
) -> None:
    """Writes `report` as a file of that kind; `title` names the model. Raises WriteFailed."""
    if kind == "json":
        write_document(file, document)
    elif kind == "csv":
        from llmcli.commands.lens.view.as_csv import lens_csv

        write_file(file, lens_csv(report))
    elif kind == "png":
        from llmcli.commands.lens.view.as_png import lens_png

        write_file(file, lens_png(report, title))
    else:
        from llmcli.commands.lens.view.page import lens_page

        write_file(file, lens_page(report, title))
