"""Ctrl-C in the first hundredths of a second, before our handlers can be there.

Until `over` is called it ends the process as it ends any other program: silently. Python would
print where it was among its imports.
"""

from __future__ import annotations

import signal


def _begin() -> bool:
    """Whether SIGINT was Python's: one that the parent ignores (`nohup`) stays ignored."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            return True
    except ValueError:  # not the main thread: an embedder's own affair
        pass
    return False


_TAKEN = _begin()


def over() -> None:
    """Gives SIGINT back to Python."""
    if _TAKEN and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
