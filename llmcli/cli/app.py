"""`llmcli`: the commands there are, and what becomes of an exception.

Only the standard library and our errors are imported above `main`, so that signals are ours
before typer is imported. Until then Ctrl-C ends the process as it ends any other program,
silently, where Python would print where it was among its imports. That comes first of all, and
takes nothing that has to be read from the disk: `signal` imports `enum`, and even
`from __future__` reads a file.
"""

import _signal  # type: ignore[import-not-found]
import os
import sys


def _silence() -> bool:
    """Whether SIGINT was Python's: one that the parent ignores (`nohup`) stays ignored."""
    try:
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
            return True
    except ValueError:  # not the main thread: an embedder's own affair
        pass
    return False


_silenced = _silence()

from collections.abc import Sequence  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from llmcli.cli.exits import SIGNALS, run  # noqa: E402

if _silenced and _signal.getsignal(_signal.SIGINT) == _signal.SIG_DFL:
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def script() -> NoReturn:
    """The `llmcli` of the command line: `main`, and then an end on the spot.

    Everything is written and closed by then; Python's own end takes torch down module by
    module, which is half a second before the prompt comes back.
    """
    os._exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (`sys.argv` by default) and returns the exit code."""
    return run(_dispatch, sys.argv[1:] if argv is None else argv)


def _dispatch(argv: list[str]) -> None:
    with SIGNALS.abrupt():
        from llmcli.cli.tree import root

        command: Any = root()
        context: Any = command.make_context("llmcli", argv or ["--help"])
    with context:
        command.invoke(context)
