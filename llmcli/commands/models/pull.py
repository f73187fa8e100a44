"""`llmcli models pull`: fetches models, so that they run without a network later."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import typer

from llmcli.errors import LlmcliError, UsageError
from llmcli.measure.machine import environment
from llmcli.records.document import members
from llmcli.records.models import PulledModel, PullFailure, PullReport
from llmcli.shell.exits import SIGNALS, tell_error
from llmcli.shell.options import MODEL, OFFLINE, OutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import arg, opt
from llmcli.shell.progress import Progress

EPILOG = """
Examples:

  llmcli models pull smollm2
  llmcli models pull org/name@v1 hf:org/name/file.gguf
  llmcli models pull org/name --offline
"""


@dataclass(frozen=True, kw_only=True)
class RevisionOptions:
    """The version of a model on the hub."""

    panel: ClassVar[str] = MODEL
    revision: str | None = opt(
        None, "--revision", "REV",
        "Branch, tag or commit on the hub, for all models that are named.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    """Which models."""

    panel: ClassVar[str] = MODEL
    names: list[str] = arg(..., "NAME...", "Models, as they are written after `-m`.")
    offline: bool = opt(False, *OFFLINE)


def command(pull: PullOptions, at: RevisionOptions, output: OutputOptions) -> None:
    """Fetches models into the caches and says where they are.

    What is there already is not fetched again, and makes no network call. Only the files that
    are needed are fetched; what was interrupted leaves nothing under a final name. Where one of
    several cannot be had, the others are fetched all the same; it exits as the first that failed.
    """
    from llmcli.checkpoints.files import shown
    from llmcli.checkpoints.names import hub_name, parse

    out = Output("models-pull", output)
    for name in pull.names:  # a wrong name is refused before the first one is downloaded
        if isinstance(parse(name, revision=at.revision), Path):
            hint = "name a model of the catalog, or `org/name` on the hub"
            if meant := hub_name(name):
                hint = f"for the model on the hub write `{shown(meant, 200)}`"
            raise UsageError(
                f"`{shown(name)}` is a path, and `models pull` fetches what is elsewhere", hint=hint
            )
    names = list(dict.fromkeys(pull.names))
    pulled: list[PulledModel] = []
    errors: dict[str, LlmcliError] = {}
    stopped = False
    for name in names:
        try:
            found = _pull(name, at.revision, pull.offline, out)
        except (KeyboardInterrupt, Exception) as error:
            stopped = isinstance(error, KeyboardInterrupt) or SIGNALS.received is not None
            if stopped:
                break
            if not isinstance(error, LlmcliError):
                raise
            errors[name] = error
            if len(names) > 1:
                tell_error(error)
        else:
            pulled.append(found)
            if not out.json:
                from llmcli.commands.models.view import Pulled

                out.show(Pulled(found))
    first = next(iter(errors.values()), None)
    if first is not None and len(names) == 1:
        raise first
    if out.json:
        report = PullReport(
            models=tuple(pulled), finish_reason="interrupted" if stopped else "complete",
            failed=tuple(
                PullFailure(name=name, code=e.code, kind=e.kind, message=e.message, hint=e.hint)
                for name, e in errors.items()
            ),
        )  # fmt: skip
        out.document(members(report), model=None, environment=environment())
    if stopped:
        done = f" after {len(pulled)} of {len(names)} models" if len(names) > 1 else ""
        raise SIGNALS.stopped(reported=out.json, where=done)
    if first is not None:
        raise typer.Exit(first.code)  # each has its line


def _pull(name: str, revision: str | None, offline: bool, out: Output) -> PulledModel:
    from llmcli.checkpoints.cache.inventory import bytes_at
    from llmcli.checkpoints.locate import find

    fetched = not _is_here(name, revision)
    with Progress(out) as progress:
        _, path = find(name, revision=revision, offline=offline, progress=progress, note=out.note)
    whole = Path(os.path.abspath(path))
    return PulledModel(name=name, path=str(whole), bytes=bytes_at(whole), fetched=fetched)


def _is_here(name: str, revision: str | None) -> bool:
    """Whether all of it is, so that nothing has to be fetched."""
    from llmcli.checkpoints.catalog import CATALOG
    from llmcli.checkpoints.names import HubId, parse

    found = parse(name, revision=revision)
    entry = CATALOG.get(name)
    if entry is not None and entry.hub_id is not None:
        found = entry.hub_id
    if isinstance(found, HubId):
        from llmcli.checkpoints.hub.download import cached

        return cached(found) is not None
    return entry is not None and entry.is_cached()
