"""Messages on a terminal of any width: no word or command is cut, nothing is lost; elsewhere one
line."""

import ast
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

import llmcli
from llmcli.cli.exits import tell
from llmcli.cli.wrap import wrapped

WORDS = st.lists(st.text("abcé漢-/.`", max_size=12), max_size=20).map(" ".join)


@settings(max_examples=100, deadline=None)
@given(WORDS, st.integers(5, 60))
def test_lines_fit_and_hold_every_word(line, width):
    lines = wrapped(line, width).split("\n")
    for one in lines:
        assert cell_len(one) <= width or " " not in re.sub("`[^`]*`", "", one).strip()
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


# what a command is made of: a program with its arguments, or an option with its value
COMMANDS = re.compile(
    r"""(?<![\w.-])(?:llmcli|pip|hf|git|python)\ (?!reads)[a-z-]
        | (?<!\w)--?[a-z][a-z-]*\ (?:[A-Z*"\d]|(?:auto|all|cpu|b?float\d+|transformers)\b)""",
    re.VERBOSE,
)


def hints() -> Iterator[tuple[str, str]]:
    """Every hint in the source, values filled in with `x`, and where it stands."""
    root = Path(llmcli.__file__).parent
    paths = (path for path in root.rglob("*.py") if "render" not in path.parts)  # what Rich wraps
    for path in sorted(paths):
        tree = ast.parse(path.read_text())
        constants = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword):
                name = node.arg or ""
            elif isinstance(node, ast.Assign):
                name = ast.unparse(node.targets[0]).lower()
            else:
                continue
            if "hint" not in name:
                continue
            value = node.value
            if isinstance(value, ast.Name):
                value = constants.get(value.id, value)
            inner = {id(one) for part in ast.walk(value) if isinstance(part, ast.JoinedStr)
                     for one in ast.walk(part) if one is not part}  # fmt: skip
            for part in ast.walk(value):
                if id(part) in inner:
                    continue
                if isinstance(part, ast.JoinedStr):
                    pieces = (getattr(piece, "value", "x") for piece in part.values)
                    text = "".join(piece if isinstance(piece, str) else "x" for piece in pieces)
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    text = part.value
                else:
                    continue
                yield f"{path.relative_to(root)}:{part.lineno}", text


def test_hints_never_break_inside_a_command():
    found = list(hints())
    assert len(found) > 200
    spans = 0
    for where, hint in found:
        bare = re.sub("`[^`]*`", "", hint)
        assert not COMMANDS.search(bare), f"{where}: backticks keep a command together: {hint}"
        for width in (20, 40, 60):
            text = wrapped(f"hint: {hint}", width)
            for command in re.findall("`[^`]*`", hint):
                assert command in text, where
                spans += " " in command
    assert spans > 100
