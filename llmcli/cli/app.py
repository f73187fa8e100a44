"""`llmcli`: the commands there are, and what becomes of an exception.

Only the standard library and our errors are imported above `main`, so that signals are ours
before typer is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from llmcli.cli.exits import run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (`sys.argv` by default) and returns the exit code."""
    return run(_dispatch, sys.argv[1:] if argv is None else argv)


def _dispatch(argv: list[str]) -> None:
    from llmcli.cli.tree import root

    command: Any = root()
    with command.make_context("llmcli", argv or ["--help"]) as context:
        command.invoke(context)
