"""`llmcli models rm`: removes models from the caches; what is removed is shown and confirmed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcli.commands.models.pull import RevisionOptions
from llmcli.errors import UsageError
from llmcli.measure.machine import environment
from llmcli.records.document import members
from llmcli.records.models import RemovalReport
from llmcli.shell.options import OutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import arg, opt

if TYPE_CHECKING:
    from llmcli.checkpoints.cache.removal import Piece

EPILOG = """
Examples:

  llmcli models rm smollm2 --dry-run
  llmcli models rm org/name org/name@v1 --yes
  llmcli models rm hf:org/name/file.gguf
"""
REMOVAL = "Removal"


@dataclass(frozen=True, kw_only=True)
class RmOptions:
    """Which models."""

    names: list[str] = arg(..., "NAME...", "Models, as `llmcli models list` names them.")


@dataclass(frozen=True, kw_only=True)
class RemovingOptions:
    """Whether anything is removed, and whether it is confirmed first."""

    panel: ClassVar[str] = REMOVAL
    yes: bool = opt(False, "-y", "--yes", "Remove without asking.")
    dry_run: bool = opt(False, "--dry-run", "Only show what would go.")


def command(
    rm: RmOptions, at: RevisionOptions, removing: RemovingOptions, output: OutputOptions
) -> None:
    """Removes models from our cache and from the hub's, which other programs share.

    Of a repository the named revision goes, and the files that no other revision needs. Asks
    first on a terminal. What another process fetches or runs is not removed, a link
    is never followed, and nothing outside of the two caches is touched.
    """
    out = Output("models-rm", output)
    from llmcli.checkpoints.cache.inventory import Inventory
    from llmcli.checkpoints.cache.removal import pieces_of

    def planned() -> list[Piece]:
        return pieces_of(rm.names, Inventory.read(), at.revision)

    run_removal(out, removing, planned, passing_over=False)


def run_removal(
    out: Output,
    options: RemovingOptions,
    planned: Callable[[], list[Piece]],
    report: Callable[..., RemovalReport] = RemovalReport,
    *,
    passing_over: bool,
) -> None:
    """Shows what `planned` lists, asks for confirmation, removes it, and shows the `report`.

    With `passing_over` what is in use stays and the rest is removed. Raises UsageError if there is
    no terminal to ask on, WriteFailed if something could not be removed.
    """
    from llmcli.checkpoints.cache.removal import remove
    from llmcli.commands.models.view import render_removal

    def show(found: RemovalReport) -> None:
        out.present(
            lambda: render_removal(found), members(found), model=None, environment=environment()
        )

    pieces = planned()
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
    gone, kept = remove(pieces, planned, passing_over=passing_over)
    show(report(removed=tuple(gone), kept=tuple(kept), dry_run=False))
    for line in kept:
        out.note(line)
