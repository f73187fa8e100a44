"""Keys that are typed while nobody reads them: not echoed, and kept for who reads next."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_LOCAL = 3  # the local modes of what `tcgetattr` returns


class Keys:
    """The terminal on stdin, which is as it was after `silent` and wherever the process stops.

    Nothing happens where stdin is no terminal, or where the process is in its background: the
    system would stop it for changing the terminal's modes.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @contextmanager
    def silent(self) -> Iterator[None]:
        """No echo, not of Ctrl-C either; Ctrl-Z gives the terminal back until `fg`."""
        try:
            self._set()
            if self._before is not None and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
                with suppress(ValueError):  # not the main thread
                    signal.signal(signal.SIGTSTP, self._suspend)
            yield
        finally:
            self.restore()
            if signal.getsignal(signal.SIGTSTP) == self._suspend:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Within `silent`: the terminal is as before, for lines that it puts together and shows."""
        silent = self._before is not None
        self.restore()
        try:
            yield
        finally:
            if silent:
                self._set()

    def restore(self) -> None:
        """As before `silent`: at its end, and at an end of the process that unwinds nothing."""
        if self._before is not None:
            _change(self._before)
        self._before = None

    def _set(self) -> None:
        if (found := _modes()) is None:
            return
        self._before = found
        silent = list(found)
        # lines are not put together either: what is typed reaches the next prompt key by key
        silent[_LOCAL] &= ~(termios.ECHO | termios.ICANON)
        _change(silent)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        silent = self._before is not None
        self.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # the process stands here until it goes on
        signal.signal(number, self._suspend)
        if silent:
            self._set()


def _modes() -> list[Any] | None:
    """Those of the terminal on stdin; None in its background."""
    try:
        terminal = sys.stdin.fileno()
        modes = termios.tcgetattr(terminal)
    except (AttributeError, OSError, ValueError, termios.error):
        return None
    with suppress(OSError):  # a terminal that controls no process of this session
        if os.tcgetpgrp(terminal) != os.getpgrp():
            return None
    return modes


def _change(modes: list[Any]) -> None:
    """Keeps what is typed already."""
    if _modes() is not None:
        with suppress(OSError, ValueError, termios.error):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, modes)


KEYS = Keys()
