"""`llmcli models pull`: fetches models, so that they run without a network later."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmcli.checkpoints.catalog import CATALOG
from llmcli.checkpoints.files import shown
from llmcli.checkpoints.locate import find
from llmcli.checkpoints.names import HubId, parse
from llmcli.cli.options import MODEL, OutputOptions
from llmcli.cli.output import Output
from llmcli.cli.progress import Progress
from llmcli.errors import UsageError
from llmcli.measure.environment import environment
from llmcli.reports.models import PulledModel

EPILOG = """
Examples:

  llmcli models pull smollm2
  llmcli models pull org/name@v1 hf:org/name/file.gguf
"""


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    """Which models."""

    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Models, as they are written after `-m`."),
    ]
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="REV",
            rich_help_panel=MODEL,
            help="Branch, tag or commit on the hub, for all of them.",
        ),
    ] = None


def command(asked: PullOptions, output: OutputOptions) -> None:
    """Fetches models into the caches and says where they are.

    What is there already is not fetched again, and makes no network call. Only the files that
    are needed are fetched; what was interrupted leaves nothing under a final name.
    """
    out = Output("models-pull", output)
    for name in asked.names:  # a wrong name is told before the first one is downloaded
        if isinstance(parse(name, revision=asked.revision), Path):
            raise UsageError(
                f"`{shown(name)}` is a path, and `models pull` fetches what is elsewhere",
                hint="name a model of the catalog, or `org/name` on the hub",
            )
    pulled = []
    for name in dict.fromkeys(asked.names):
        pulled.append(_pull(name, asked.revision, out))
        if not out.json:
            from llmcli.render.models import render_pulled

            out.show(render_pulled(pulled[-1]))
    if out.json:
        out.document({"models": pulled}, model=None, environment=environment())


def _pull(name: str, revision: str | None, out: Output) -> PulledModel:
    from llmcli.checkpoints.cache.inventory import bytes_at

    fetched = not _is_here(name, revision)
    with Progress(out) as progress:
        _, path = find(name, revision=revision, progress=progress, note=out.note)
    whole = Path(os.path.abspath(path))
    return PulledModel(name=name, path=str(whole), bytes=bytes_at(whole), fetched=fetched)


def _is_here(name: str, revision: str | None) -> bool:
    """Whether all of it is, so that nothing has to be fetched."""
    found = parse(name, revision=revision)
    entry = CATALOG.get(name)
    if entry is not None and entry.repository is not None:
        found = HubId(repository=entry.repository, revision=entry.revision)
    if isinstance(found, HubId):
        from llmcli.checkpoints.hub.download import cached

        return cached(found) is not None
    return entry is not None and entry.is_cached()
