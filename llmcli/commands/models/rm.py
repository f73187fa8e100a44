"""`llmcli models rm`: removes models from the caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.cli.options import OutputOptions
from llmcli.cli.output import Output
from llmcli.cli.params import arg
from llmcli.commands.models.options import RevisionOptions
from llmcli.commands.models.removing import RemovingOptions, run_removal

if TYPE_CHECKING:
    from llmcli.checkpoints.cache.removal import Piece

EPILOG = """
Examples:

  llmcli models rm smollm2 --dry-run
  llmcli models rm org/name org/name@v1 --yes
  llmcli models rm hf:org/name/file.gguf
"""


@dataclass(frozen=True, kw_only=True)
class RmOptions:
    """Which models."""

    names: list[str] = arg(..., "NAME...", "Models, as `llmcli models list` names them.")


def command(
    asked: RmOptions, at: RevisionOptions, removing: RemovingOptions, output: OutputOptions
) -> None:
    """Removes models from our cache and from the hub's, which other programs share.

    Of a repository the named revision goes, and the files that no other revision needs. Asks
    first where somebody can answer. What another process fetches or runs is not removed, a link
    is never followed, and nothing outside of the two caches is touched.
    """
    out = Output("models-rm", output)
    from llmcli.checkpoints.cache.inventory import Inventory
    from llmcli.checkpoints.cache.removal import pieces_of

    def planned() -> list[Piece]:
        return pieces_of(asked.names, Inventory.read(), at.revision)

    run_removal(out, removing, planned, passing_over=False)
