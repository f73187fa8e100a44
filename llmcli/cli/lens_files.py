"""The files of `llmcli lens`: which there are, how large they get, and writing one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.cli.files import check_size
from llmcli.cli.output import write_document, write_file
from llmcli.reports.lens import LensReport

FILES = ("html", "png", "json", "csv")

# bytes of one of the likeliest tokens of a cell, with its share of the cell: about so many
_CSV, _JSON = 130, 100


def check_lens_size(
    file: str, kind: str, rows: int, positions: int, top: int, *, force: bool
) -> None:
    """Refuses, before anything is computed, a file that gets too large.

    Raises UsageError and WriteFailed as `check_size` does. A picture has a bounded size.
    """
    from llmcli.render.page import lens_page_size

    tokens = rows * positions * top
    sizes = {
        "html": lens_page_size(rows, positions, top),
        "json": tokens * _JSON,
        "csv": tokens * _CSV,
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
        from llmcli.render.lens_csv import lens_csv

        write_file(file, lens_csv(report))
    elif kind == "png":
        from llmcli.render.lens_png import lens_png

        write_file(file, lens_png(report, title))
    else:
        from llmcli.render.page import lens_page

        write_file(file, lens_page(report, title))
