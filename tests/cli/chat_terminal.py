"""Programs on a terminal of their own, such as `llmcli chat`, for tests that type into it."""

import fcntl
import io
import json
import os
import pty
import re
import select
import shlex
import struct
import sys
import termios
import time
from codecs import getincrementaldecoder
from pathlib import Path

import children

SCRIPTED = Path(__file__).parent.parent / "scripted.py"
PROMPT = "\r\n>"  # at the beginning of a line


class Keyboard(io.StringIO):
    """The stdin of a terminal without an editor: its lines, or what gives them when they are read.
    """

    def __init__(self, lines):
        super().__init__()
        self.lines, self.buffer = iter(lines), self

    def isatty(self):
        return True

    def readline(self, size=-1):
        line = next(self.lines, "")
        line = line() if callable(line) else line
        return f"{line}\n".encode() if line else b""


class Window:
    """A program on a terminal of its own; `raw` is all that it wrote there, when it has ended."""

    def __init__(self, command, *, columns=100, cwd=None, stdout=None, **environ):
        self.controller, inner = pty.openpty()
        self.resize(columns)
        self.modes = termios.tcgetattr(inner)
        self.seen = self.raw = ""
        self.decoded = getincrementaldecoder("utf-8")("replace").decode
        self.process = children.start(
            command, terminal=True, stdin=inner, stdout=stdout or inner, stderr=inner, cwd=cwd,
            env={**os.environ, **environ},
        )  # fmt: skip
        os.close(inner)

    def resize(self, columns):
        fcntl.ioctl(self.controller, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def restored(self):
        """Whether the terminal's modes are those of the beginning."""
        return termios.tcgetattr(self.controller) == self.modes

    def read(self):
        """What is shown within a moment; whether more may come."""
        ended = self.process.poll() is not None
        if not select.select([self.controller], [], [], 0.2)[0]:
            return not ended
        try:
            piece = os.read(self.controller, 65536)
        except OSError:  # Linux: nobody has the terminal open any more
            piece = b""
        shown = self.decoded(piece)
        self.raw += shown
        if "\x1b[6n" in shown:  # where the cursor is
            os.write(self.controller, b"\x1b[1;1R")
        self.seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]", "", shown)
        return bool(piece)

    def wait(self, text):
        """Until `text` was shown since the last time; returns what was."""
        end = time.monotonic() + 60
        while text not in self.seen and time.monotonic() < end and self.read():
            pass
        assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, keys, then=""):
        """Returns what is shown until `then`."""
        os.write(self.controller, keys.encode())
        return self.wait(then) if then else ""

    def end(self, keys=""):
        """The exit code, of what is typed last; the terminal's modes are those of the beginning."""
        self.type(keys)
        end = time.monotonic() + 60
        while time.monotonic() < end and self.read():
            pass
        code = self.process.wait(timeout=60)
        assert self.restored()
        os.close(self.controller)
        return code


class Terminal(Window):
    """`llmcli chat` on a terminal of its own, with the answers `spoken` where they are given.

    Those come a token every `pace` seconds. `shell`: what `sh` is given, `$0` the command.
    """

    def __init__(self, talker, *argv, home, spoken=(), pace=0.006, shell="", **environ):
        program = [str(SCRIPTED)] if spoken else ["-m", "llmcli"]
        command = [sys.executable, *program, "chat", "-m", talker, *argv]
        command = ["sh", "-c", shell, shlex.join(command)] if shell else command
        given = {"ANSWERS": json.dumps(spoken), "PACE": str(pace), "XDG_STATE_HOME": str(home)}
        super().__init__(command, **{"TERM": "xterm", **given, **environ})
