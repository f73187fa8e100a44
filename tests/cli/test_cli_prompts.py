"""Where a text comes from: argument, file, pipe, redirected file, ids."""

from __future__ import annotations

import io
import os
import socket
import sys
from pathlib import Path
from threading import Timer

import children
import pytest

from llmcli.cli import prompts
from llmcli.cli.options import GivenPromptOptions, PromptOptions
from llmcli.cli.prompts import (
    LOOKED_AT,
    looked_at,
    parse_ids,
    prompt_or_builtin,
    read_prompt,
    stdin_is_given,
)
from llmcli.commands.generate.batch import read_batch
from llmcli.errors import UsageError


@pytest.fixture
def stdin(monkeypatch):
    """Puts bytes on stdin through a real pipe."""
    opened = []

    def put(data: bytes) -> None:
        reading, writing = os.pipe()
        os.write(writing, data)
        os.close(writing)
        stream = io.TextIOWrapper(os.fdopen(reading, "rb"))
        opened.append(stream)
        monkeypatch.setattr("sys.stdin", stream)

    yield put
    for stream in opened:
        stream.close()


def prompt(text=None, **options):
    return read_prompt(PromptOptions(prompt=text, **options)).text


def test_argument_alone(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert prompt("hello\n") == "hello\n"


@pytest.mark.parametrize(
    ("data", "argument", "expected"),
    [
        (b"pipe\n", None, "pipe"),
        (b"pipe\n\n", None, "pipe\n"),
        (b"pipe\r\n", None, "pipe"),
        (b"a\r\nb", None, "a\r\nb"),
        (b"pipe\n", "argument", "pipe\nargument"),
        (b"", "argument", "argument"),
        (b"\n", "argument", "argument"),
        ("käse 🎉".encode(), None, "käse 🎉"),
        (b"pipe", "-", "pipe"),
    ],
)
def test_pipes_come_first_and_lose_one_newline(stdin, data, argument, expected):
    stdin(data)
    assert prompt(argument) == expected


def test_file_and_pipe_and_argument_are_joined_in_this_order(stdin, tmp_path):
    stdin(b"pipe\n")
    (tmp_path / "f").write_text("file\n")
    assert prompt("argument", file=str(tmp_path / "f")) == "pipe\nfile\nargument"


def test_no_stdin_leaves_the_pipe_alone(stdin):
    stdin(b"pipe")
    assert prompt("argument", no_stdin=True) == "argument"
    with pytest.raises(UsageError, match="there is no prompt"):
        prompt(no_stdin=True)


def given(notes, text=None, **options):
    return prompt_or_builtin(
        GivenPromptOptions(prompt=text, **options), "built in", notes.append
    ).text


def test_where_stdin_is_read_for_a_dash_only_a_pipe_is_left_alone_and_that_is_said(stdin):
    notes = []
    stdin(b"pipe")
    assert given(notes, "argument") == "argument"
    assert notes == []
    assert given(notes) == "built in"
    assert notes == ["no prompt was given: `built in` is used; stdin was not read: give `-` for it"]
    assert given(notes, "-") == "pipe"


def test_without_a_pipe_there_is_nothing_to_say_about_stdin(monkeypatch):
    notes = []
    with open(os.devnull) as device:
        monkeypatch.setattr("sys.stdin", device)
        assert given(notes) == "built in"
    assert notes == ["no prompt was given: `built in` is used"]
    with pytest.raises(UsageError, match="there is no prompt") as caught:
        given(notes, "")
    assert caught.value.hint == (
        'give a text ("…"), `-f FILE`, `-` for stdin, or token ids with `--ids 1,2,3`'
    )


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (b"pipe\n", {}, "pipe"),
        (b"pipe\n", {"prompt": "argument"}, "pipe\nargument"),
        (b"", {"prompt": "argument"}, "argument"),
        (b"", {}, LOOKED_AT),
        (b"\n", {}, LOOKED_AT),
        (b"pipe", {"no_stdin": True}, LOOKED_AT),
        (b"pipe", {"no_stdin": True, "prompt": "argument"}, "argument"),
    ],
)
def test_what_is_looked_at_is_a_pipe_too_and_the_builtin_where_nothing_was_given(
    stdin, data, options, expected
):
    notes = []
    stdin(data)
    assert looked_at(PromptOptions(**options), notes.append).text == expected
    said = "no prompt was given: `In the beginning God created …` is used"
    assert notes == ([said] if expected == LOOKED_AT else [])


def test_an_empty_argument_is_not_the_builtin_prompt(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="there is no prompt"):
        looked_at(PromptOptions(prompt=""), pytest.fail)


@pytest.mark.parametrize("data", [b"", b"\n"])
def test_nothing_at_all_is_an_error(stdin, data):
    stdin(data)
    with pytest.raises(UsageError, match="there is no prompt") as caught:
        prompt()
    assert "`-f FILE`, a pipe, or token ids" in caught.value.hint


def test_bytes_that_are_not_utf8_are_named_with_their_place(stdin):
    stdin(b"abc\xff")
    with pytest.raises(UsageError, match="byte 0xff at offset 3"):
        prompt()


def test_a_mark_in_front_of_utf8_is_no_text(stdin, tmp_path):
    stdin(b"\xef\xbb\xbfpiped \xef\xbb\xbf\n")
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbfa file\r\n")
    assert prompt(file=str(tmp_path / "f")) == "piped \ufeff\na file"
    stdin(b"\xef\xbb\xbfabc\xff")
    with pytest.raises(UsageError, match="byte 0xff at offset 6"):
        prompt()


MARK = b"\xef\xbb\xbf"


def test_a_mark_in_front_of_a_batch_and_of_a_conversation(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(MARK + b'"one"\n"two"\n')
    assert [one.text for one in read_batch(str(tmp_path / "b.jsonl"))] == ["one", "two"]
    (tmp_path / "c.json").write_bytes(MARK + b'{"messages": [{"role": "user", "content": "x"}]}')
    given = PromptOptions(prompt=None, file=str(tmp_path / "c.json"), no_stdin=True)
    assert read_prompt(given).conversation.last == "x"


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        ("hé".encode("utf-16"), "utf-16"), ("h".encode("utf-32"), "utf-32"),
        (b"\xfe\xff\0h", "utf-16"), ("two".encode("utf-16-le"), "utf-16le"),
        ("two".encode("utf-16-be"), "utf-16be"),
        ('{"messages": [{"role": "user", "content": "x"}]}'.encode("utf-16"), "utf-16"),
    ],
)  # fmt: skip
def test_utf16_is_named_with_the_command_that_converts_it(stdin, tmp_path, data, encoding):
    (tmp_path / "f.json").write_bytes(data)
    stdin(data)
    path = str(tmp_path / "f.json")
    for ask in (prompt, lambda: prompt("x", file=path), lambda: read_batch(path)):
        with pytest.raises(UsageError, match=f"is {encoding.upper()} text, not UTF-8") as caught:
            ask()
        assert caught.value.hint == f"convert it first: `iconv -f {encoding} -t utf-8`"
        stdin(b"")


def test_an_argument_that_is_not_utf8_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="not UTF-8"):
        prompt(os.fsdecode(b"abc\xff"))


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


@pytest.mark.parametrize(
    ("text", "ids"), [("1,2,3", (1, 2, 3)), (" 7 ", (7,)), ("1 2\n3", (1, 2, 3)), ("0", (0,))]
)
def test_ids(text, ids):
    assert parse_ids(text) == ids


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1,,x", "٣", "9999999999"])
def test_ids_that_are_none(text):
    with pytest.raises(UsageError, match="--ids"):
        parse_ids(text)


def test_a_file_that_cannot_be_read_has_a_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    (tmp_path / "prompt.txt").write_text("x")
    for name, reason, hint in [
        ("promt.txt", "no such file", f"did you mean `{tmp_path}/prompt.txt`?"),
        ("zzzz", "no such file", "give the path of a file of text"),
        ("no/prompt.txt", "no such file", "give the path of a file of text"),
        (".", "is a directory", "give the path of a file of text"),
    ]:
        with pytest.raises(UsageError, match=reason) as caught:
            prompt(file=str(tmp_path / name))
        assert caught.value.hint.startswith(hint)
    with pytest.raises(UsageError, match="the name of the file is empty"):
        prompt(file="")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("-", {}),
        ("-", {"no_stdin": True}),
        ("x", {"ids": "1"}),
        (None, {"ids": "x"}),
        (None, {"ids": ","}),
        (os.fsdecode(b"\xff"), {}),
    ],
)
def test_every_refusal_says_what_to_do(text, options, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError) as caught:
        prompt(text, **options)
    assert caught.value.hint


def test_a_text_without_end_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr(prompts, "MOST", 1000)
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
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: stdin has more than 64 MiB, which is too much text")


@pytest.mark.parametrize(
    ("argv", "written", "way_out"),
    [
        (["tokens", "-m", "tiny", "In the"], b"", True),
        (["tokens", "-m", "tiny"], b"begun, and not ended", True),
        (["generate", "-m", "tiny", "-n", "1", "--raw", "In the"], b"", True),
        (["tokens", "-m", "tiny", "-"], b"", False),
        (["shapes", "-m", "tiny", "-"], b"a", False),
        (["generate", "-m", "tiny", "-n", "1", "--batch", "-"], b"", False),
        (["bench", "compare", "-", "none.json"], b"", False),
    ],
)
def test_an_open_pipe_is_said_to_be_waited_for(cli, monkeypatch, argv, written, way_out):
    """What a job, an editor or an agent hands down: nobody writes to it, or not to its end."""
    monkeypatch.setattr(prompts, "PATIENCE", 0.05)
    reading, writing = os.pipe()
    os.write(writing, written)
    Timer(0.5, os.close, [writing]).start()
    with io.TextIOWrapper(os.fdopen(reading, "rb")) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        said = cli(*argv).err.splitlines()[0]
    waits = "note: waiting for the end of stdin, which is still open"
    assert said == waits + "; `--no-stdin` does not read it" * way_out


def test_a_pipe_that_ends_needs_no_words(cli, stdin, monkeypatch):
    monkeypatch.setattr(prompts, "PATIENCE", 0.05)
    stdin(b"x")
    result = cli("tokens", "-m", "tiny")
    assert (result.code, result.err) == (0, "")
