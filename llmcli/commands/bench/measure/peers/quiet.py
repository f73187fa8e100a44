"""Silence for libraries that write wherever they like, from Python or from C."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress


@contextmanager
def silent() -> Iterator[None]:
    """What is written to stdout or stderr inside goes nowhere, even where C code writes it.

    What this program had written before is flushed first, so that nothing of it is lost.
    """
    _flush()
    saved = []
    for number in (1, 2):
        with suppress(OSError):  # closed by whoever started us
            saved.append((number, os.dup(number)))
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            for number, _ in saved:
                os.dup2(nowhere.fileno(), number)
            # Python's streams as well: they need not be those of the process
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
            _flush()  # what came through a stream that the library had kept
    finally:
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or not there at all
            stream.flush()
