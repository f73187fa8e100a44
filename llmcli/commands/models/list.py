"""`llmcli models list`: the catalog and what is in both caches."""

from __future__ import annotations

from llmcli.measure.machine import environment
from llmcli.records.document import members
from llmcli.records.models import ModelsReport
from llmcli.shell.options import PagedOutputOptions
from llmcli.shell.output import Output

EPILOG = """
Examples:

  llmcli models
  llmcli models pull smollm2-bf16
  llmcli models path smollm2
  llmcli models rm smollm2-bf16 --dry-run
  llmcli models prune --older-than 30d

`llmcli models COMMAND --help` explains each of list, pull, rm, path and prune.
"""


def command(output: PagedOutputOptions) -> None:
    """The models that `-m` knows by name: those of the catalog, and those in the caches.

    With the place, the size, the commit and the last use of each, and whether anything of it is
    missing. Looks at file names and sizes; reads no weights, and makes no network call.
    """
    from llmcli.checkpoints.cache.inventory import Inventory
    from llmcli.checkpoints.cache.prune import left_over
    from llmcli.commands.models.view import render_models

    out = Output("models-list", output)
    inventory = Inventory.read()
    report = ModelsReport(
        models=tuple(stored.model for stored in inventory.stored()),
        caches=inventory.caches(),
        left_over=sum(piece.removal.bytes for piece in left_over(inventory)),
        warnings=inventory.warnings(),
    )
    out.present(
        lambda: render_models(report), members(report), model=None, environment=environment()
    )
    if not out.json:
        for warning in report.warnings:
            out.note(warning)
