"""Messages on a terminal of any width: no word is cut, nothing is lost; elsewhere one line."""

import io
import os
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from llmcli.cli.exits import tell
from llmcli.cli.wrap import wrapped

WORDS = st.lists(st.text("abcé漢-/.`", max_size=12), max_size=20).map(" ".join)


@settings(max_examples=100, deadline=None)
@given(WORDS, st.integers(5, 60))
def test_lines_fit_and_hold_every_word(line, width):
    lines = wrapped(line, width).split("\n")
    for one in lines:
        assert cell_len(one) <= width or " " not in one.strip()
    assert all(one.startswith("  ") for one in lines[1:])
    assert " ".join([lines[0], *(one[2:] for one in lines[1:])]) == line


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 77


def test_only_a_terminal_breaks_lines(monkeypatch):
    message = "hint: fetch it again, or give its path with `-m /a/very/long/path/of/a/model.gguf`"
    for stream, columns in ((Terminal(), 40), (io.StringIO(), 10_000)):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((40, 9)))
        tell(message)
        seen = stream.getvalue().removesuffix("\n")
        assert max(map(len, seen.split("\n"))) <= columns
        assert re.sub(r"\n +", " ", seen) == message
    assert seen == message


def test_a_traceback_keeps_its_lines(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "10")
    tell('  File "a.py", line 3, in b')
    assert stream.getvalue() == '  File "a.py", line 3, in b\n'
