"""What is written and what is read.

Written: JSON of anything, colour and width by the rules, lines, bars and notes. Read: a text from
an argument, a file, a pipe, ids or a conversation; and how a run is repeated.
"""

import ast
import copy
import io
import json
import math
import os
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import children
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ROOT
from rich.cells import cell_len

import llmcli
from llmcli.cli.group import width
from llmcli.commands.attention.command import replay_command
from llmcli.commands.attention.options import AttentionOptions
from llmcli.errors import UsageError
from llmcli.kernels import native
from llmcli.shell import documents, prompts
from llmcli.shell.batch import read_batch
from llmcli.shell.conversations import read_conversation
from llmcli.shell.encoding import TemplateOptions, template_variables
from llmcli.shell.exits import tell
from llmcli.shell.inspection import NewTokensOptions
from llmcli.shell.options import ModelOptions, OutputOptions, PromptOptions
from llmcli.shell.output import Output, Screen, dumps, json_pieces, jsonable
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import read_prompt, stdin_is_given
from llmcli.shell.sampling import DEFAULTS
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


def test_kernels_that_are_turned_off_are_noted(capsys, monkeypatch):
    monkeypatch.setattr(native, "TRITON_STATE", native.TritonState())
    for quiet in (True, False):
        Output("models", OutputOptions(quiet=quiet))
        native.TRITON_STATE.warn(f"quiet {quiet}")
    assert capsys.readouterr().err == "note: quiet False\n"


@pytest.fixture
def progress(monkeypatch):
    """`progress(screen, …)`: what it would draw on that terminal, without waiting."""
    monkeypatch.setattr("llmcli.shell.progress.PATIENCE_S", 0)
    monkeypatch.setattr("llmcli.shell.progress.BETWEEN_S", 0)

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
    seen = capsys.readouterr().err
    assert "downloading x" in seen
    assert " 67 %" in seen
    assert seen.endswith("\x1b[2K")
    assert not re.search(r"\x1b\[[\d;]*m", seen)
    assert (", 2 MiB of 3 MiB, " in seen) is (width >= 80)
    assert ("iB/s" in seen) is (width >= 80)


# what is read


def prompt(text=None, **options):
    return read_prompt(PromptOptions(prompt=text, **options), print).text


@pytest.mark.parametrize(("data", "encoding"), [
    ("hé".encode("utf-16"), "utf-16"), ("h".encode("utf-32"), "utf-32"), (b"\xfe\xff\0h", "utf-16"),
    ("two".encode("utf-16-le"), "utf-16le"), ("two".encode("utf-16-be"), "utf-16be"),
    ('{"messages": [{"role": "user", "content": "x"}]}'.encode("utf-16"), "utf-16"),
])  # fmt: skip
def test_utf16_is_named_with_the_command_that_converts_it(monkeypatch, tmp_path, data, encoding):
    file = tmp_path / "f.json"
    file.write_bytes(data)
    path = str(file)
    with file.open() as stream:
        for stdin, ask in (
            (stream, prompt), (None, lambda: prompt("x", file=path)),
            (None, lambda: read_batch(path)),
        ):  # fmt: skip
            monkeypatch.setattr("sys.stdin", stdin)
            told = f"is {encoding.upper()} text, not UTF-8"
            with pytest.raises(UsageError, match=told) as caught:
                ask()
            assert caught.value.hint == f"convert it first: `iconv -f {encoding} -t utf-8`"


def test_a_redirected_file_is_read_and_devices_and_sockets_are_not(tmp_path):
    (tmp_path / "f").write_text("x")
    with (tmp_path / "f").open() as file:
        assert stdin_is_given(file)
    with open(os.devnull) as device:
        assert not stdin_is_given(device)
    left, right = socket.socketpair()
    with left, right, left.makefile() as stream:
        assert not stdin_is_given(stream)
    assert not stdin_is_given(None)
    assert not stdin_is_given(io.StringIO("no descriptor"))


def test_a_text_without_end_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr(documents, "MOST", 1000)
    file = tmp_path / "x"
    file.write_bytes(b"a" * 1000)
    assert prompt(file=str(file)) == "a" * 1000
    file.write_bytes(b"a" * 1001)
    for path in (str(file), "/dev/zero", "/dev/urandom"):
        with pytest.raises(UsageError, match=f"`{path}` has more than 0 MiB") as caught:
            prompt(file=path)
        assert caught.value.hint


def test_an_endless_pipe_is_refused():
    """With a bound on memory, which reading all of it would meet first."""
    done = children.run(
        ["bash", "-c", f"ulimit -v 3000000; yes | {sys.executable} -m llmcli tokens -m tiny -"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: stdin has more than 64 MiB, which is too much text")


@pytest.mark.parametrize(("argv", "written", "way_out"), [
    (["tokens", "-m", "tiny", "In the"], b"", True),
    (["tokens", "-m", "tiny"], b"begun, and not ended", True),
    (["generate", "-m", "tiny", "-n", "1", "--raw", "In the"], b"", True),
    (["tokens", "-m", "tiny", "-"], b"", False),
    (["shapes", "-m", "tiny", "-"], b"a", False),
    (["generate", "-m", "tiny", "-n", "1", "--batch", "-"], b"", False),
    (["bench", "compare", "-", "none.json"], b"", False),
])
def test_an_open_pipe_is_said_to_be_waited_for(cli, monkeypatch, argv, written, way_out):
    """A pipe of a job, an editor or an agent, in which nothing is written or no end comes."""
    reading, writing = os.pipe()
    os.write(writing, written)

    def tell_and_end(note):  # the pipe stays open until then, however slow the machine is
        tell(note)
        os.close(writing)

    monkeypatch.setattr(prompts, "PATIENCE", 0.05)
    monkeypatch.setattr(prompts, "tell", tell_and_end)
    with io.TextIOWrapper(os.fdopen(reading, "rb")) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        said = cli(*argv).err.splitlines()[0]
    waits = "note: waiting for the end of stdin, which is still open"
    assert said == waits + "; `--no-stdin` does not read it" * way_out


def test_a_pipe_that_ends_is_read_without_a_word(cli, monkeypatch):
    monkeypatch.setattr(prompts, "PATIENCE", 0.05)
    reading, writing = os.pipe()
    os.write(writing, b"x")
    os.close(writing)
    with io.TextIOWrapper(os.fdopen(reading, "rb")) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        result = cli("tokens", "-m", "tiny", "--json")
    assert (result.code, result.err) == (0, "")
    assert [token["text"] for token in result.json()["tokens"]] == ["x"]


# conversations: `{"messages": […]}` as it is read, checked and timed, and variables


def user(text):
    return {"role": "user", "content": text}


def test_values_of_variables_are_json_or_text():
    given = ["a=true", "b=1.5", 'c="x"', "d=x=y", "e=", 'f={"g": [1]}', "h=null"]
    assert template_variables(given) == {
        "a": True, "b": 1.5, "c": "x", "d": "x=y", "e": "", "f": {"g": [1]}, "h": None,
    }  # fmt: skip
    line = replay_command(TemplateOptions(variable=["a=1", "b=it's"]))
    assert line == "llmcli attention --set a=1 --set 'b=it'\"'\"'s'"


def test_a_conversation_is_timed_and_climbed(run_tiny, tmp_path):
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({"messages": [user("hi")]}))
    timed = ("timing", "-f", str(file), "--phase", "prefill", "--pairs", "1", "--json")
    assert run_tiny(*timed).json()["prompt_tokens"] == len("hi") + 3
    climbed = run_tiny("ladder", "-f", str(file), "--rung", "6", "--json").json()
    assert len(climbed["ids"]) == len("hi") + 3


def test_what_is_wrong_with_a_conversation_is_said_with_its_place(as_written):
    """A conversation and the message about it in each line of a file."""
    file, found = Path(__file__).with_name("refused-conversations.txt"), []
    for row in file.read_text("utf-8").splitlines():
        value = row.partition(" → ")[0]
        with pytest.raises(UsageError) as caught:
            read_conversation(json.loads(value), "F")
        assert caught.value.hint
        found.append(f"{value} → {caught.value.message}\n")
    as_written(file, "".join(found))


SAVED = {
    "schema": "llmcli.chat/1", "model": {"name": "m"}, "vocabulary": 300, "answers": 1,
    "sampling": {**DEFAULTS, "seed": 1, "max_tokens": -1, "stop": ["x"]}, "variables": {"a": [1]},
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning": "z", "raw": "zy", "ids": [7],
         "lead": "l", "finish_reason": "eos"},
    ],
}  # fmt: skip
GIVEN = {"variables": {"a": {"b": 1}}, "messages": [
    {"role": "user", "name": "n", "content": [{"type": "text", "text": "x"}]},
    {"role": "assistant", "tool_calls": [{"id": "1"}], "thinking": "z"},
]}  # fmt: skip


def places(value, path=""):
    """Every value in a document of JSON with what holds it: (path, container, key)."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        inside = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".removeprefix(".")
        yield inside, value, key
        if isinstance(one, dict | list):
            yield from places(one, inside)


def refusal(document):
    """The error of a document that is refused, else None."""
    try:
        read_conversation(document, "F")
    except UsageError as error:
        return error
    return None


@pytest.mark.parametrize("document", [SAVED, GIVEN])
def test_any_value_that_is_wrong_is_read_or_named(document):
    """Each value replaced by each other one: it is read, or an error names its place."""
    assert refusal(document) is None
    refused = 0
    for number in range(len(list(places(document)))):
        for wrong in (None, True, -1, 1.5, 1e300, "x", "", "\ud83d", [], [[]], {}, {"a b": 1}):
            changed = copy.deepcopy(document)
            path, container, key = list(places(changed))[number]
            container[key] = wrong
            if error := refusal(changed):
                named = re.match(r"(?:`([^`]+)` of )?F ", error.message)[1] or ""
                assert path.startswith(named) or named.startswith(path), error.message
                assert error.hint
                refused += 1
    assert refused > 6 * number


def test_messages_as_other_programs_write_them():
    tool = {"role": "tool", "content": "x"}
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": None}
    found = read_conversation({"messages": [{"role": "user", "content": parts}, call, tool]}, "F")
    assert list(found.template_input()) == [
        user("a b"), {"role": "assistant", "tool_calls": [{"id": "1"}]}, tool,
    ]  # fmt: skip


# the command line of a run once more


@pytest.mark.parametrize(("given", "line"), [
    ((ModelOptions(), PromptOptions(), AttentionOptions()), ""),
    ((PromptOptions(prompt="a b"), ModelOptions(model="tiny")), " 'a b' -m tiny"),
    ((AttentionOptions(layer="0", synthetic=32),), " --layer 0 --synthetic 32"),
    ((NewTokensOptions(generate=4), AttentionOptions(key="-2:")), " --generate 4 --key -2:"),
    ((PromptOptions(prompt="a " * 30),), " PROMPT"), ((PromptOptions(prompt="a\nb"),), " PROMPT"),
    ((PromptOptions(ids=",".join("1" * 30)),), " --ids 1,2,3"),
    ((PromptOptions(file="/a" * 30),), f" -f {'/a' * 30}"),
    ((PromptOptions(prompt="it's $HOME"),), " 'it'\"'\"'s $HOME'"),
])  # fmt: skip
def test_only_what_is_not_as_by_default_is_repeated(given, line):
    assert replay_command(*given) == f"llmcli attention{line}"


def test_a_shell_reads_it_as_it_was():
    text = "a 'quoted' \"text\" $(ls) `id` \\"
    assert shlex.split(replay_command(PromptOptions(prompt=text))) == ["llmcli", "attention", text]
