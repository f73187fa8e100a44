"""What several of the five commands take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from llmcli.cli.options import MODEL


@dataclass(frozen=True, kw_only=True)
class RevisionOptions:
    """Which version of what is on the hub."""

    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="REV",
            rich_help_panel=MODEL,
            help="Branch, tag or commit on the hub, for all that are named.",
        ),
    ] = None
