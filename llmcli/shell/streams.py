"""The streams of the process: stdout and stderr, and the terminal on stdin.

Of stdout and stderr: what they have so far, their width, what they cannot take, their end. Keys
that are typed while no prompt reads them are not echoed, and kept for the next reader.
"""

from __future__ import annotations

import codecs
import os
import re
import signal
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from llmcli.errors import WriteFailed

_LOCAL = 3  # the local modes of what `tcgetattr` returns
# signs that an encoding may lack, and their spelling in ASCII
_SIGNS = """
    ✓ ok     ✗ FAIL   · .      • *      … ...    – -      — -      − -
    × x      → ->     ← <-     ≥ >=     ≤ <=     ≠ !=     ≈ ~      ∞ inf
    √ sqrt   Σ sum    α alpha  σ sigma  ε eps    ‖ ||     │ |      ─ -
    ▒ =      ░ :      ᵀ ^T     ʰ ^h     ᵢ _i     ′ '      ± +-     ∘ o
    ⊕ (+)    μ mu     µ u      π pi     ω omega  φ phi    Φ Phi    Δ Delta
    δ delta  β beta   ÷ /      ₛ _s     ₑ _e     ᵣ _r      “ "      ” "      ‘ '      ’ '
"""
_SPELLED = {
    **dict(re.findall(r"(\S) (\S+)", _SIGNS)),
    **dict.fromkeys("┌┐└┘├┤┬┴┼", "+"),
    **dict.fromkeys("█▓▀▄▌", "#"),
    **{power: f"^{number}" for number, power in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{below: f"_{number}" for number, below in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    "\u200e": "",  # which is not seen either where it can be written
}


def spelled(text: str) -> str:
    """`text` with every sign that is not ASCII spelled, `?` for those that have no spelling."""
    return "".join(c if c.isascii() else _SPELLED.get(c, "?") for c in text)


def _handle(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return spelled(error.object[error.start : error.end]), error.end


ERRORS = "llmcli.spelled"  # the name for `errors=` of a stream
codecs.register_error(ERRORS, _handle)


class Stdout:
    """What stdout has so far.

    `document`: a JSON document, or the beginning of one. No error document follows it then.
    `line_open`: text whose last line has no end yet.
    """

    document = False
    line_open = False


STDOUT = Stdout()


def write(text: str, *, flush: bool = True) -> None:
    """Writes to stdout. Raises BrokenPipeError if the reader is gone, else WriteFailed."""
    if sys.stdout is None:
        raise WriteFailed("could not write the output: stdout is closed")
    try:
        sys.stdout.write(text)
        if text:
            STDOUT.line_open = not text.endswith("\n")
        if flush:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise WriteFailed(f"could not write the output: {reason}") from error


def erase_line() -> None:
    """Takes back what stands on the current line of stderr; only for a terminal."""
    try:
        dumb = os.environ.get("TERM") == "dumb"
        sys.stderr.write("\n" if dumb else "\r\x1b[K")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def begin_line() -> None:
    """Where stdout and stderr are one file or terminal, stderr begins on a line of its own.

    Text in a pipe gets no final newline; with `2>&1` the next message would stand behind it.
    """
    if not STDOUT.line_open or sys.stdout is None or sys.stderr is None:
        return
    try:
        if os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno()):
            sys.stderr.write("\n")
            STDOUT.line_open = False
    except (OSError, ValueError):  # a stream that is no file, or closed
        pass


def escape_unencodable(stream: TextIO | None) -> None:
    """A character that the stream's encoding lacks is spelled (`?` if need be): no error.

    In the locale C Python escapes surrogates, which leaves every other character an error, and in
    C.UTF-8 it writes them as the bytes that they stand for, which are not UTF-8.
    """
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is None:
        return
    everything = getattr(stream, "encoding", "").lower().replace("-", "") == "utf8"
    fails = ("strict", "surrogateescape") + (() if everything else ("backslashreplace",))
    if getattr(stream, "errors", "") in fails:
        reconfigure(errors=ERRORS)


def detach(stream: TextIO | None) -> None:
    """Points a stream that cannot be written any more at nothing.

    Python flushes again when it ends, and would print a warning and exit with 120.
    """
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        to_devnull(stream)


def to_devnull(stream: TextIO | None) -> None:
    """Points a stream at nothing: what it still holds and all that follows is dropped."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)
    except (AttributeError, OSError, ValueError):
        pass


def columns(stream: TextIO | None, environ: Mapping[str, str]) -> int:
    """How wide what is written to `stream` may be; 0 where nothing bounds it.

    Of a terminal $COLUMNS, else its own width (stderr's is not stdout's), else 80. Of anything else
    the width of the terminal that stderr is, else $COLUMNS. $COLUMNS counts where it is a number.
    """
    text = environ.get("COLUMNS", "")
    given = int(text) if text.isdecimal() else 0
    if stream is None or not stream.isatty():
        if sys.stderr is None or sys.stderr.closed or not sys.stderr.isatty():
            return given
        stream, given = sys.stderr, 0
    try:
        return given or os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def wrapped(line: str, width: int) -> str:
    """`line` in lines of at most `width` columns, all but the first one indented.

    A word that is longer stays whole, and so does what stands in backticks, spaces included: the
    terminal breaks it, and a path or a command can still be copied.
    """
    from rich.cells import cell_len

    if cell_len(line) <= width:
        return line
    # messages have no control characters, so NUL can stand for a space that must not break
    line = re.sub("`[^`]*`", lambda span: span[0].replace(" ", "\0"), line)
    lines = [""]
    for number, word in enumerate(line.split(" ")):
        word = word.replace("\0", " ")
        longer = f"{lines[-1]} {word}" if number else word
        if number and cell_len(longer) > width:
            lines.append(f"  {word}")
        else:
            lines[-1] = longer
    return "\n".join(lines)


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
