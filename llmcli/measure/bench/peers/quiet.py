"""Silence for libraries that write wherever they like, from Python or from C."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def silent() -> Iterator[None]:
    """What is written to stdout or stderr inside goes nowhere, even where C code writes it.

    Only what this program had written before is flushed first, so that nothing of it is lost.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or None under pythonw
            stream.flush()
    saved = [(number, os.dup(number)) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number, _ in saved:
            os.dup2(nowhere, number)
        yield
    finally:
        # Python's own buffers hold what the library printed through `print`: into nowhere as well
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
