"""`llmcli models prune`: removes stale downloads and replaced versions."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcli.commands.models.rm import REMOVAL, RemovingOptions, run_removal
from llmcli.errors import UsageError
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


def command(prune: PruneOptions, removing: RemovingOptions, output: OutputOptions) -> None:
    """Removes stale partial downloads, and what newer versions have replaced.

    In our cache: scratch, and versions that the catalog no longer names. In the hub's, of models
    alone: partial downloads, files that no snapshot links to, commits that a branch has moved on
    from, downloads that only began, empty repositories. Other programs share the hub's cache:
    `--dry-run` shows what would go. What another process is using stays.
    """
    age = None if prune.older_than is None else _seconds(prune.older_than)
    out = Output("models-prune", output)
    from llmcli.checkpoints.cache.inventory import Inventory
    from llmcli.checkpoints.cache.prune import left_over

    since = None if age is None else time.time() - age

    def planned() -> list[Piece]:
        return left_over(Inventory.read(), since)

    more = {"older_than": prune.older_than}
    run_removal(out, removing, planned, passing_over=True, more=more)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})\s*([hdw])", text.strip(), re.ASCII)
    if found is None:
        raise UsageError(
            f"`--older-than` takes a number of hours, days or weeks, not `{text}`",
            hint="such as `--older-than 30d`",
        )
    return float(int(found[1]) * _SECONDS[found[2]])
