"""What is written: JSON of anything, colour and width by the rules, lines, bars and notes."""

import ast
import io
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

import llmcli
from llmcli.cli.group import width
from llmcli.shell.exits import tell
from llmcli.shell.options import OutputOptions
from llmcli.shell.output import Output, Screen, dumps, json_pieces, jsonable
from llmcli.shell.progress import Progress
from llmcli.shell.streams import wrapped


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 77


@pytest.mark.parametrize(("stream", "environ", "colour", "animate"), [
    (Terminal(), {}, True, True),
    (io.StringIO(), {}, False, False),
    (None, {"FORCE_COLOR": "1"}, True, False),
    (Terminal(), {"NO_COLOR": "1"}, False, True),
    (Terminal(), {"NO_COLOR": ""}, True, True),
    (Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, True),
    (io.StringIO(), {"FORCE_COLOR": "1"}, True, False),
    (io.StringIO(), {"FORCE_COLOR": "0"}, False, False),
    (io.StringIO(), {"FORCE_COLOR": ""}, False, False),
    (Terminal(), {"TERM": "dumb"}, False, False),
    (Terminal(), {"TERM": "dumb", "FORCE_COLOR": "1"}, False, False),
])
def test_colour_and_animation(stream, environ, colour, animate):
    screen = Screen.of(stream, environ)
    assert (screen.colour, screen.animate) == (colour, animate)


def test_the_width_is_that_of_the_stream_itself(monkeypatch):
    sizes = {77: os.terminal_size((50, 9))}
    monkeypatch.setattr(os, "get_terminal_size", sizes.__getitem__)
    for stream, environ, columns in (
        (Terminal(), {}, 50), (Terminal(), {"COLUMNS": "33"}, 33), (io.StringIO(), {}, 10_000),
        (io.StringIO(), {"COLUMNS": "33"}, 33),
    ):  # fmt: skip
        assert Screen.of(stream, environ).width == columns
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert Screen.of(io.StringIO(), {}).width == 50, "a pipe that ends on the terminal of stderr"
    assert Screen.of(io.StringIO(), {"COLUMNS": "33"}).width == 50
    assert width() == 50


WORDS = st.lists(st.text("abcé漢-/.`", max_size=12), max_size=20).map(" ".join)


@settings(max_examples=100, deadline=None)
@given(WORDS, st.integers(5, 60))
def test_lines_fit_and_hold_every_word(line, width):
    lines = wrapped(line, width).split("\n")
    for one in lines:
        assert cell_len(one) <= width or " " not in re.sub("`[^`]*`", "", one).strip()
    assert all(one.startswith("  ") for one in lines[1:])
    assert " ".join([lines[0], *(one[2:] for one in lines[1:])]) == line


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


# what a command is made of: a program with its arguments, or an option with its value
COMMANDS = re.compile(
    r"""(?<![\w.-])(?:llmcli|pip|hf|git|python)\ (?!reads)[a-z-]
        | (?<!\w)--?[a-z][a-z-]*\ (?:[A-Z*"\d]|(?:auto|all|cpu|b?float\d+|transformers)\b)""",
    re.VERBOSE,
)


def named(node: ast.AST) -> str:
    """What a value is given to."""
    if isinstance(node, ast.keyword):
        return node.arg or ""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Attribute):
        return ast.unparse(node.targets[0]).lower()
    return ""


def texts(value: ast.AST) -> Iterator[str]:
    """The texts in an expression, values filled in with `x`."""
    if isinstance(value, ast.JoinedStr):
        pieces = (getattr(piece, "value", "x") for piece in value.values)
        yield "".join(piece if isinstance(piece, str) else "x" for piece in pieces)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    else:
        for inner in ast.iter_child_nodes(value):
            yield from texts(inner)


def hints() -> Iterator[tuple[str, str]]:
    """Every hint in the source, and where it stands."""
    root = Path(llmcli.__file__).parent
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "render" in path.parts or "hint" not in source.lower():  # Rich wraps what is in render
            continue
        tree = ast.parse(source)
        constants = {
            node.targets[0].id: node.value for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }  # fmt: skip
        for node in ast.walk(tree):
            if "hint" in named(node):
                value = node.value
                if isinstance(value, ast.Name):
                    value = constants.get(value.id, value)
                for text in texts(value):
                    yield f"{path.relative_to(root)}:{value.lineno}", text


def test_hints_never_break_inside_a_command():
    found = list(hints())
    assert len(found) > 200
    spans = 0
    for where, hint in found:
        bare = re.sub("`[^`]*`", "", hint)
        assert not COMMANDS.search(bare), f"{where}: backticks keep a command together: {hint}"
        for columns in (20, 40, 60):
            text = wrapped(f"hint: {hint}", columns)
            for command in re.findall("`[^`]*`", hint):
                assert command in text, where
                spans += " " in command
    assert spans > 100


@dataclass
class Point:
    x: float
    where: Path


def test_everything_becomes_json():
    value = {
        "nan": math.nan, "inf": -math.inf, "tuple": (1, True, None), 3: np.float32(0.5),
        "array": np.array([[1.0, np.nan]]), "point": Point(2.5, Path("a/b")), "int": np.int64(7),
    }  # fmt: skip
    assert json.loads(dumps(value)) == {
        "nan": None, "inf": None, "tuple": [1, True, None], "3": 0.5,
        "array": [[1.0, None]], "point": {"x": 2.5, "where": "a/b"}, "int": 7,
    }  # fmt: skip
    assert jsonable(Point(math.nan, Path("x"))) == {"x": None, "where": "x"}


def test_json_is_ascii():
    """No terminal that shows it, and no encoding of a pipe, can change what it says."""
    value = {"ü🎉": "\u202e\x9b\x7f\ud800"}
    text = '{"\\u00fc\\ud83c\\udf89": "\\u202e\\u009b\\u007f\\\\ud800"}'
    assert dumps(value) == "".join(json_pieces(value)) == text


@pytest.fixture
def progress(monkeypatch):
    """`progress(screen, …)`: what it would draw on that terminal, without waiting."""
    monkeypatch.setattr("llmcli.shell.progress.PATIENCE_S", 0)

    def begun(*words, colour=True, width=80, **how):
        out = Output("models", OutputOptions())
        out.err = Screen(terminal=True, animate=True, colour=colour, width=width)
        return out, Progress(out, *words, **how)

    return begun


def test_progress_is_drawn_by_the_thread_that_works(progress, capsys):
    """So that no other takes time from what is timed; a prompt is counted in tokens."""
    before, seen = set(threading.enumerate()), []
    with progress("loading x …", tokens=True)[1] as drawn:
        for done in (1024, 2048):
            drawn("reading the prompt", done, 3001)
            seen += set(threading.enumerate()) - before
    shown, _, bar = capsys.readouterr().err.partition("\r\x1b[K")
    assert (shown, seen) == ("loading x …", [])
    assert "reading the prompt" in bar
    assert "1024 / 3001 tokens" in bar


def test_a_note_does_not_end_up_behind_a_bar(progress, capsys):
    out, bar = progress()
    with bar as drawn:
        drawn("downloading x", 1, 3)
        out.note("it comes from elsewhere")
        drawn("downloading y", 2, 3)
    first, note, rest = capsys.readouterr().err.partition("note: it comes from elsewhere\n")
    assert "downloading x" in first
    assert first.endswith("\x1b[2K")  # the line is empty again
    assert note
    assert "downloading y" in rest
    out.note("after it")
    assert capsys.readouterr().err == "note: after it\n"


@pytest.mark.parametrize("width", [60, 100])
def test_without_colour_a_bar_is_drawn_and_erased(progress, capsys, width):
    with progress(colour=False, width=width)[1] as drawn:
        for done in range(1, 4):
            drawn("downloading x", done << 20, 3 << 20)
            time.sleep(0.15)
    seen = capsys.readouterr().err
    assert "downloading x" in seen
    assert " 67 %" in seen
    assert seen.endswith("\x1b[2K")
    assert not re.search(r"\x1b\[[\d;]*m", seen)
    assert (", 2 MiB of 3 MiB, " in seen) is (width >= 80)
    assert ("iB/s" in seen) is (width >= 80)
