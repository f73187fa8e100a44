"""What `rm` and `prune` share: what would go is shown, asked about, and removed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from llmcli.cli.output import Output
from llmcli.cli.params import opt
from llmcli.errors import UsageError
from llmcli.observe.environment import environment
from llmcli.reports.models import RemovalReport

if TYPE_CHECKING:
    from llmcli.checkpoints.cache.removal import Piece

REMOVAL = "Removal"


@dataclass(frozen=True, kw_only=True)
class RemovingOptions:
    """Whether anything is removed, and whether it is asked about first."""

    panel: ClassVar[str] = REMOVAL
    yes: bool = opt(False, "-y", "--yes", "Remove without asking.")
    dry_run: bool = opt(False, "--dry-run", "Only show what would go.")


def run_removal(
    out: Output,
    options: RemovingOptions,
    planned: Callable[[], list[Piece]],
    *,
    passing_over: bool,
    more: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Shows what `planned` lists, asks, and removes it; `more` are keys of the JSON document.

    With `passing_over` what is in use stays and the rest goes. Raises UsageError where it has to
    be asked and nobody can answer, WriteFailed where something could not be removed.
    """
    from llmcli.checkpoints.cache.removal import remove
    from llmcli.commands.models.view import render_removal

    pieces = planned()
    told = tuple(piece.removal for piece in pieces)
    plan = RemovalReport(removed=told, kept=(), dry_run=True)
    if not pieces or options.dry_run:
        _show(out, plan, more)
        return
    if not options.yes:
        _need_somebody()
        out.aside(render_removal(plan))
        if not _agreed():
            out.note("nothing was removed")
            return
    gone, kept = remove(pieces, planned, passing_over=passing_over)
    report = RemovalReport(removed=tuple(gone), kept=tuple(kept), dry_run=False)
    _show(out, report, more)
    for line in kept:
        out.note(line)


def _show(out: Output, report: RemovalReport, more: Mapping[str, object]) -> None:
    if out.json:
        body = vars(report) | {"bytes": report.bytes, **more}
        out.document(body, model=None, environment=environment())
        return
    from llmcli.commands.models.view import render_removal

    out.show(render_removal(report))


def _need_somebody() -> None:
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr and sys.stderr.isatty()):
        raise UsageError(
            "nobody can be asked here whether to remove it",
            hint="add `--yes`, or `--dry-run` to see what would go",
        )


def _agreed() -> bool:
    sys.stderr.write("remove it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
