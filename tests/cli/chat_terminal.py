"""`llmcli chat` on a terminal of its own, for tests that type into it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time

import children

PROMPT = "\r\n>"  # at the beginning of a line


class Terminal:
    """`llmcli chat` on a terminal of its own."""

    def __init__(self, talker, *argv, home):
        self.controller, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.seen = ""
        self.process = children.start(
            [sys.executable, "-m", "llmcli", "chat", "-m", talker, *argv],
            stdin=inner, stdout=inner, stderr=inner,
            env={**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(home)},
        )  # fmt: skip
        os.close(inner)

    def wait(self, text):
        """Until `text` was shown since the last time; returns what was."""
        end = time.monotonic() + 60
        while text not in self.seen and time.monotonic() < end:
            if select.select([self.controller], [], [], 0.2)[0]:
                try:
                    shown = os.read(self.controller, 65536).decode(errors="replace")
                except OSError:
                    break
                if "\x1b[6n" in shown:  # where the cursor is
                    os.write(self.controller, b"\x1b[1;1R")
                self.seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]", "", shown)
        assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, keys):
        os.write(self.controller, keys.encode())

    def end(self):
        code = self.process.wait(timeout=60)
        os.close(self.controller)
        return code
