"""`llmcli models path`: the path of a model, for scripts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from llmcli.commands.models.pull import RevisionOptions
from llmcli.errors import LlmcliError, ModelNotFound, NetworkError
from llmcli.measure.machine import environment
from llmcli.shell.options import OutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import arg
from llmcli.ui.theme import encodable

EPILOG = """
Examples:

  llmcli models path smollm2
  ls -l "$(llmcli models path smollm2)"
"""


@dataclass(frozen=True, kw_only=True)
class PathOptions:
    """Which model."""

    name: str = arg(..., "NAME", "The model, as it is written after `-m`.")


def command(path: PathOptions, at: RevisionOptions, output: OutputOptions) -> None:
    """Print the path of a model: its file or directory. Exits with 3 if it is not on this machine.

    Fetches nothing; `llmcli models pull NAME` does.
    """
    from llmcli.checkpoints.files import shown
    from llmcli.checkpoints.locate import find
    from llmcli.checkpoints.names import typed

    out = Output("models-path", output)
    try:
        _, place = find(path.name, revision=at.revision, offline=True)
    except NetworkError:
        words = typed(path.name, at.revision)
        raise ModelNotFound(
            f"`{words}` is not on this machine", hint=f"`llmcli models pull {words}` fetches it"
        ) from None
    whole = os.path.abspath(place)
    if out.json:
        out.document({"name": path.name, "path": whole}, model=None, environment=environment())
    elif encodable(whole) != whole:
        raise LlmcliError(
            f"the path of `{shown(path.name)}` is not UTF-8: {shown(Path(whole))}",
            hint="rename its directory, or name it in the shell by a pattern",
        )
    else:
        out.write(f"{whole}\n")
