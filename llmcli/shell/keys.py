"""Keys typed while no prompt reads them: not echoed, and kept for the next reader."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

_LOCAL = 3  # the local modes of what `tcgetattr` returns


class Keys:
    """The terminal on stdin, which is as it was after `silent` and wherever the process stops.

    Nothing happens where stdin is no terminal, or where the process is in its background: the
    system would stop it for changing the terminal's modes.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None
        self._prompt: TextIO | None = None

    @contextmanager
    def silent(self) -> Iterator[None]:
        """No echo, not of Ctrl-C either.

        Ctrl-Z gives the terminal back until `fg`, and so does SIGQUIT, which ends the process.
        """
        given = (signal.SIGTSTP, signal.SIGQUIT)
        try:
            self._set()
            for number in given:
                if self._before is not None and signal.getsignal(number) is signal.SIG_DFL:
                    with suppress(ValueError):  # not the main thread
                        signal.signal(number, self._suspend)
            yield
        finally:
            self.restore()
            for number in given:
                if signal.getsignal(number) == self._suspend:
                    signal.signal(number, signal.SIG_DFL)

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

    @contextmanager
    def prompt(self, stream: TextIO) -> Iterator[None]:
        """Within `silent`: a prompt on the terminal `stream` has it mark what is pasted."""
        self._prompt = stream
        try:
            yield
        finally:
            self._unmark()  # what a signal breaks off while it draws does not
            self._prompt = None

    def _unmark(self) -> None:
        if self._prompt is not None:
            with suppress(OSError, ValueError):
                os.write(self._prompt.fileno(), b"\x1b[?2004l")

    def restore(self) -> None:
        """Restores the modes from before `silent`; also called where the process ends at once."""
        self._unmark()
        if self._before is not None:
            change_modes(sys.stdin, self._before)
        self._before = None

    def _set(self) -> None:
        if (found := modes_of(sys.stdin)) is None:
            return
        self._before = found
        silent = list(found)
        # lines are not put together either: what is typed reaches the next prompt key by key
        silent[_LOCAL] &= ~(termios.ECHO | termios.ICANON)
        change_modes(sys.stdin, silent)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        silent = self._before is not None
        self.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # the process stands here until it goes on
        signal.signal(number, self._suspend)
        if silent:
            self._set()


def modes_of(stream: TextIO) -> list[Any] | None:
    """The modes of the terminal behind `stream`; None for a background process."""
    try:
        terminal = stream.fileno()
        modes = termios.tcgetattr(terminal)
    except (AttributeError, OSError, ValueError, termios.error):
        return None
    with suppress(OSError):  # a terminal that controls no process of this session
        if os.tcgetpgrp(terminal) != os.getpgrp():
            return None
    return modes


def change_modes(stream: TextIO, modes: list[Any]) -> None:
    """Keeps what is typed already; nothing happens in the terminal's background."""
    if modes_of(stream) is not None:
        with suppress(OSError, ValueError, termios.error):
            termios.tcsetattr(stream.fileno(), termios.TCSANOW, modes)


KEYS = Keys()
