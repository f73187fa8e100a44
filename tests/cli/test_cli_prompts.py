"""Where a text comes from: argument, file, pipe, ids, a conversation; and a run once more."""

import copy
import io
import json
import os
import re
import shlex
import socket
import sys
from pathlib import Path

import children
import pytest

from llmcli.commands.attention.command import replay_command
from llmcli.commands.attention.options import AttentionOptions
from llmcli.commands.generate.command import read_batch
from llmcli.errors import UsageError
from llmcli.shell import documents, prompts
from llmcli.shell.conversations import read_conversation
from llmcli.shell.encoding import TemplateOptions, template_variables
from llmcli.shell.exits import tell
from llmcli.shell.inspection import NewTokensOptions
from llmcli.shell.options import ModelOptions, PromptOptions
from llmcli.shell.prompts import read_prompt, stdin_is_given
from llmcli.shell.sampling import DEFAULTS


def prompt(text=None, **options):
    return read_prompt(PromptOptions(prompt=text, **options)).text


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
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False,
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


def test_a_pipe_that_ends_needs_no_words(cli, monkeypatch):
    monkeypatch.setattr(prompts, "PATIENCE", 0.05)
    reading, writing = os.pipe()
    os.write(writing, b"x")
    os.close(writing)
    with io.TextIOWrapper(os.fdopen(reading, "rb")) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        result = cli("tokens", "-m", "tiny")
    assert (result.code, result.err) == (0, "")


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
    found = read_conversation(
        {"messages": [{"role": "user", "content": parts}, call, tool]}, "F"
    )
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
