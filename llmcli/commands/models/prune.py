"""`llmcli models prune`: removes stale downloads and replaced versions."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from llmcli.commands.models.rm import REMOVAL, RemovingOptions, run_removal
from llmcli.errors import UsageError
from llmcli.records.models import PruneReport
from llmcli.shell.options import OutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import opt

if TYPE_CHECKING:
    from llmcli.checkpoints.cache.removal import Piece

EPILOG = """
Examples:

  llmcli models prune --dry-run
  llmcli models prune --older-than 30d --yes
"""
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """What counts as needed."""

    panel: ClassVar[str] = REMOVAL
    older_than: str | None = opt(
        None, "--older-than", "TIME",
        "Models, too, that were not used for so long: 12h, 30d or 8w.",
    )  # fmt: skip

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


def command(prune: PruneOptions, removing: RemovingOptions, output: OutputOptions) -> None:
    """Removes stale partial downloads, and what newer versions have replaced.

    In our cache: scratch, and versions that the catalog no longer names. In the hub's, of models
    alone: partial downloads, files that no snapshot links to, commits that a branch has moved on
    from, downloads that only began, empty repositories. Other programs share the hub's cache:
    `--dry-run` shows what would go. What another process is using stays.
    """
    since = prune.since()
    out = Output("models-prune", output)
    from llmcli.checkpoints.cache.inventory import Inventory
    from llmcli.checkpoints.cache.prune import left_over

    def planned() -> list[Piece]:
        return left_over(Inventory.read(), since)

    report = partial(PruneReport, older_than=prune.older_than)
    run_removal(out, removing, planned, report, passing_over=True)
