"""`llmcli models`: list, fetch, find and remove the models on this machine."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from llmcli.errors import LlmcliError, ModelNotFound, NetworkError, UsageError
from llmcli.records.document import members
from llmcli.records.models import (
    ModelsReport,
    PruneReport,
    PulledModel,
    PullFailure,
    PullReport,
    RemovalReport,
)
from llmcli.shell.exits import SIGNALS, tell_error
from llmcli.shell.options import MODEL, OFFLINE, OutputOptions, PagedOutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import Without, arg, opt
from llmcli.shell.progress import Progress
from llmcli.ui.theme import encodable

if TYPE_CHECKING:
    from llmcli.checkpoints.cache import Inventory
    from llmcli.checkpoints.removal import Piece

EPILOG = """
Examples:

  llmcli models
  llmcli models pull smollm2-bf16
  llmcli models path smollm2
  llmcli models rm smollm2-bf16 --dry-run
  llmcli models prune --older-than 30d

`llmcli models COMMAND --help` explains each of list, pull, rm, path and prune.
"""
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, kw_only=True)
class NamesOptions:
    """Which models."""

    panel: ClassVar[str] = MODEL
    names: list[str] = arg(..., "NAME...", "Models, as `-m` and `llmcli models list` name them.")
    offline: bool = opt(False, *OFFLINE)


@dataclass(frozen=True, kw_only=True)
class PathOptions:
    """Which model."""

    name: str = arg(..., "NAME", "The model, as it is written after `-m`.")


@dataclass(frozen=True, kw_only=True)
class RevisionOptions:
    """The version of a model on the hub."""

    panel: ClassVar[str] = MODEL
    revision: str | None = opt(
        None, "--revision REV", "Branch, tag or commit on the hub, for all models that are named."
    )


@dataclass(frozen=True, kw_only=True)
class RemovalOptions:
    """What is removed, and whether it is confirmed first."""

    panel: ClassVar[str] = "Removal"
    older_than: str | None = opt(
        None, "--older-than TIME", "Models, too, that were not used for so long: 12h, 30d or 8w."
    )
    yes: bool = opt(False, "-y --yes", "Remove without asking.")
    dry_run: bool = opt(False, "--dry-run", "Only show what would go.")

    def since(self) -> float | None:
        """The time, in seconds since 1970, from which on a model counts as used."""
        if self.older_than is None:
            return None
        found = re.fullmatch(r"(\d{1,6})\s*([hdw])", self.older_than.strip(), re.ASCII)
        if found is None:
            raise UsageError(
                f"`--older-than` takes a number of hours, days or weeks, not `{self.older_than}`",
                hint="such as `--older-than 30d`",
            )
        return time.time() - int(found[1]) * _SECONDS[found[2]]


def command(output: PagedOutputOptions) -> None:
    """The models that `-m` knows by name: those of the catalog, and those in the caches.

    With the place, size, commit and last use of each, and whether files are missing. Looks only at
    file names and sizes: reads no weights, and makes no network call.
    """
    from llmcli.checkpoints.cache import Inventory
    from llmcli.checkpoints.removal import left_over
    from llmcli.commands.models.view import render_models

    out = Output("models-list", output)
    inventory = Inventory.read()
    report = ModelsReport(
        models=tuple(stored.model for stored in inventory.stored()),
        caches=inventory.caches(),
        left_over=sum(piece.removal.bytes for piece in left_over(inventory)),
        warnings=inventory.warnings(),
    )
    out.present(lambda: render_models(report), members(report))
    if not out.json:
        for warning in report.warnings:
            out.note(warning)


def pull(which: NamesOptions, at: RevisionOptions, output: OutputOptions) -> None:
    """Fetches models into the caches and says where they are.

    A model that is already here is not fetched again, and needs no network call. Only the files
    that are needed are fetched; an interrupted download leaves nothing under a final name. If one
    of several models cannot be fetched, the others still are; the exit code is the first failure's.
    """
    from llmcli.checkpoints.files import shown
    from llmcli.checkpoints.names import hub_name, parse

    out = Output("models-pull", output)
    for name in which.names:  # a wrong name is refused before the first one is downloaded
        if isinstance(parse(name, revision=at.revision), Path):
            hint = "name a model of the catalog, or `org/name` on the hub"
            if meant := hub_name(name):
                hint = f"for the model on the hub write `{shown(meant, 200)}`"
            raise UsageError(
                f"`{shown(name)}` is a path, and `models pull` fetches what is elsewhere", hint=hint
            )
    names = list(dict.fromkeys(which.names))
    pulled: list[PulledModel] = []
    errors: dict[str, LlmcliError] = {}
    stopped = False
    for name in names:
        try:
            found = _pull(name, at.revision, which.offline, out)
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
                from llmcli.commands.models.view import render_pulled

                out.show(render_pulled(found, out.out.width))
    first = next(iter(errors.values()), None)
    if first is not None and len(names) == 1:
        raise first
    if out.json:
        failed = (
            PullFailure(name=name, code=e.code, kind=e.kind, message=e.message, hint=e.hint)
            for name, e in errors.items()
        )
        reason: Literal["complete", "interrupted"] = "interrupted" if stopped else "complete"
        report = PullReport(models=tuple(pulled), failed=tuple(failed), finish_reason=reason)
        out.document(members(report))
    if stopped:
        done = f" after {len(pulled)} of {len(names)} models" if len(names) > 1 else ""
        raise SIGNALS.stopped(reported=out.json, where=done)
    if first is not None:
        raise SystemExit(first.code)  # each has its line


def _pull(name: str, revision: str | None, offline: bool, out: Output) -> PulledModel:
    from llmcli.checkpoints.cache import bytes_at
    from llmcli.checkpoints.catalog import CatalogEntry, named
    from llmcli.checkpoints.hub.download import cached
    from llmcli.checkpoints.locate import find
    from llmcli.checkpoints.names import HubId

    found = named(name, revision)
    here = isinstance(found, CatalogEntry) and found.is_cached()
    here |= isinstance(found, HubId) and cached(found) is not None
    with Progress(out) as progress:
        _, path = find(name, revision=revision, offline=offline, progress=progress, note=out.note)
    whole = Path(os.path.abspath(path))
    return PulledModel(name=name, path=str(whole), bytes=bytes_at(whole), fetched=not here)


def path(which: PathOptions, at: RevisionOptions, output: OutputOptions) -> None:
    """Print the path of a model: its file or directory. Exits with 3 if it is not on this machine.

    Fetches nothing; `llmcli models pull NAME` does.
    """
    from llmcli.checkpoints.files import shown
    from llmcli.checkpoints.locate import find
    from llmcli.checkpoints.names import typed

    out = Output("models-path", output)
    try:
        _, place = find(which.name, revision=at.revision, offline=True)
    except NetworkError:
        words = typed(which.name, at.revision)
        raise ModelNotFound(
            f"`{words}` is not on this machine", hint=f"`llmcli models pull {words}` fetches it"
        ) from None
    whole = os.path.abspath(place)
    if out.json:
        out.document({"name": which.name, "path": whole})
    elif encodable(whole) != whole:
        raise LlmcliError(
            f"the path of `{shown(which.name)}` is not UTF-8: {shown(Path(whole))}",
            hint="rename its directory, or name it in the shell by a pattern",
        )
    else:
        out.write(f"{whole}\n")


def rm(
    which: Annotated[NamesOptions, Without(("offline",))],
    at: RevisionOptions,
    removal: Annotated[RemovalOptions, Without(("older_than",))],
    output: OutputOptions,
) -> None:
    """Removes models from our cache and from the hub's, which other programs share.

    Of a repository the named revision goes, and the files that no other revision needs. Asks
    first on a terminal. A link is never followed, and nothing outside of the two caches is touched.
    """
    out = Output("models-rm", output)
    from llmcli.checkpoints.removal import pieces_of

    _remove(out, removal, lambda here: pieces_of(which.names, here, at.revision))


def prune(removal: RemovalOptions, output: OutputOptions) -> None:
    """Removes stale partial downloads, and what newer versions have replaced.

    In our cache: scratch, and versions that the catalog no longer names. In the hub's, of models
    alone: partial downloads, files that no snapshot links to, commits that a branch has moved on
    from, downloads that only began, empty repositories. Other programs share the hub's cache:
    `--dry-run` shows what would go.
    """
    since = removal.since()
    out = Output("models-prune", output)
    from llmcli.checkpoints.removal import left_over

    report = partial(PruneReport, older_than=removal.older_than)
    _remove(out, removal, lambda here: left_over(here, since), report, passing_over=True)


def _remove(
    out: Output,
    options: RemovalOptions,
    planned: Callable[[Inventory], list[Piece]],
    report: Callable[..., RemovalReport] = RemovalReport,
    *,
    passing_over: bool = False,
) -> None:
    """Shows what `planned` lists, asks for confirmation, removes it, and shows the `report`.

    With `passing_over` what cannot be removed stays and the rest is removed. Raises UsageError if
    there is no terminal to ask on, WriteFailed if something could not be removed.
    """
    from llmcli.checkpoints.cache import Inventory
    from llmcli.checkpoints.removal import remove
    from llmcli.commands.models.view import render_removal

    def show(found: RemovalReport) -> None:
        out.present(lambda: render_removal(found), members(found))

    def listed() -> list[Piece]:
        return planned(Inventory.read())

    pieces = listed()
    plan = report(removed=tuple(piece.removal for piece in pieces), kept=(), dry_run=True)
    if not pieces or options.dry_run:
        show(plan)
        return
    if not options.yes:
        if not (sys.stdin and sys.stdin.isatty() and sys.stderr and sys.stderr.isatty()):
            raise UsageError(
                "removing models needs a confirmation, and there is no terminal to ask on",
                hint="add `--yes`, or `--dry-run` to see what would go",
            )
        out.aside(render_removal(plan))
        sys.stderr.write("remove it? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            out.note("nothing was removed")
            return
    gone, kept = remove(pieces, listed, passing_over=passing_over)
    show(report(removed=tuple(gone), kept=tuple(kept), dry_run=False))
    for line in kept:
        out.note(line)


# further commands of two words: their functions, and the examples that end their help
NESTED = {
    "models pull": (pull, """
Examples:

  llmcli models pull smollm2
  llmcli models pull org/name@v1 hf:org/name/file.gguf
  llmcli models pull org/name --offline
"""),
    "models rm": (rm, """
Examples:

  llmcli models rm smollm2 --dry-run
  llmcli models rm org/name org/name@v1 --yes
  llmcli models rm hf:org/name/file.gguf
"""),
    "models path": (path, """
Examples:

  llmcli models path smollm2
  ls -l "$(llmcli models path smollm2)"
"""),
    "models prune": (prune, """
Examples:

  llmcli models prune --dry-run
  llmcli models prune --older-than 30d --yes
"""),
}
