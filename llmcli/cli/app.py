"""`llmcli`: the commands there are, and what becomes of an exception.

Only the standard library and our errors are imported above `main`, so that signals are ours
before typer is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from llmcli.shell.exits import SIGNALS, run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (`sys.argv` by default) and returns the exit code."""
    return run(_dispatch, sys.argv[1:] if argv is None else argv)


def _dispatch(argv: list[str]) -> None:
    if argv[:1] == ["_complete"]:  # a shell asks
        from llmcli.cli.complete import answer

        answer(argv[1:])
        return
    try:
        with SIGNALS.abrupt():
            from llmcli.cli.tree import root

            command: Any = root()
            context: Any = command.make_context("llmcli", argv or ["--help"])
        with context:
            command.invoke(context)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        from llmcli.cli.group import usage_error

        raise usage_error(error) from error
