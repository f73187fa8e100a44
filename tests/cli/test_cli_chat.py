"""`chat`: what its transcripts cannot show: errors, signals, a terminal, and files."""

import io
import json
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import children
import programs
import pytest
from chat_terminal import PROMPT, Keyboard, Terminal
from cli_tiny import write_tiny
from json_schemas import errors

from llmcli.commands.chat import command, slash, typed
from llmcli.commands.chat.chat import Chat
from llmcli.engine.sampler import Sampler
from llmcli.engine.session import Session
from llmcli.errors import CheckpointError, NotFinite
from llmcli.shell.output import Output
from llmcli.text.chat import ChatTemplate

GREEDY = ("--greedy", "-n", "8")


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A model with a chat template and room for a long conversation."""
    folder = tmp_path_factory.mktemp("talker") / "m"
    return str(write_tiny(folder, weights=True, max_position_embeddings=600))


@pytest.fixture
def chat(cli, talker, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return lambda *argv: cli("chat", "-m", talker, "--seed", "1", *argv)


@pytest.fixture
def converse(cli, talker, monkeypatch):
    """A conversation of these lines, as a terminal without an editor gives them."""

    def run(*lines, argv=()):
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr("sys.stdin", Keyboard(lines))
        return cli("chat", "-m", talker, "--seed", "1", *argv)

    return run


def transcript(file):
    return json.loads(file.read_text())


def test_a_load_that_fails_or_is_interrupted_changes_nothing(converse, tmp_path, monkeypatch):
    file, bad, out = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    converse("hello", argv=(*GREEDY, "--save", file))
    changed = transcript(file)
    changed["messages"][0]["content"] = "another"
    changed["sampling"] |= {"temperature": 9, "stop": ["bad"], "seed": 77}
    bad.write_text(json.dumps(changed | {"variables": {"lead": "bad"}}))
    render = ChatTemplate.render
    for error in (KeyboardInterrupt(), CheckpointError("the chat template failed: x")):

        def broken(self, messages, error=error, **more):
            if messages[0]["content"] == "another":
                raise error
            return render(self, messages, **more)

        with monkeypatch.context() as patch:
            patch.setattr(ChatTemplate, "render", broken)
            said = converse(f"/load {file}", f"/load {bad}", f"/save {out}")
        assert said.code == 0
        assert transcript(out) == transcript(file) | {"environment": transcript(out)["environment"]}
    assert "error: the chat template failed: x" in said.err


def test_a_file_that_is_nested_too_deep_to_be_read_is_not_replaced(converse, chat, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("[" * 100_000)
    assert chat("--prompt", "hello", "--save", str(notes)).code == 1
    said = converse("hello", f"/save {notes}", argv=GREEDY)
    assert said.err.count("it exists and is not a transcript of `llmcli chat`") == 1
    assert notes.read_text() == "[" * 100_000


@pytest.mark.parametrize("option", ["--save", "--load", "/save"])
def test_what_another_chat_saved_meanwhile_is_not_replaced(
    converse, chat, tmp_path, monkeypatch, option
):
    file, link, third = (tmp_path / name for name in ("talk.json", "link.json", "third.json"))
    link.symlink_to(file)
    chat("--prompt", "before", *GREEDY, "--save", file)
    others = file.read_bytes() + b" "

    def another_chat_saves():
        (tmp_path / "new").write_bytes(others)
        (tmp_path / "new").replace(file)
        return "two"

    argv = {"--save": ("--save", file), "--load": ("--load", file, "--save", link), "/save": ()}
    first = f"/save {file}" if option == "/save" else "one"
    lines = (first, another_chat_saves, f"/save {link}", f"/save {third}", "four")
    said = converse(*lines, argv=(*GREEDY, *argv[option]))
    assert file.read_bytes() == others
    assert said.err.count("has changed since this chat read it") >= 2
    assert "hint: `/save FILE` saves under another name" in said.err
    assert [one["content"] for one in transcript(third)["messages"]][-4::2] == ["two", "four"]
    answered = chat("--prompt", "x", *GREEDY, "--save", file)  # it is read anew
    assert (answered.code, len(transcript(file)["messages"])) == (0, 2)
    made = command._chat

    def late(*given):
        another_chat_saves()
        return made(*given)

    monkeypatch.setattr(command, "_chat", late)
    refused = chat("--prompt", "x", *GREEDY, "--save", file)
    assert refused.code == 1
    assert "hint: `--save FILE` saves under another name" in refused.err
    assert refused.out, "the answer is shown"
    assert file.read_bytes() == others


@pytest.mark.parametrize(("of", "name"), [(Chat, "stats_line"), (slash, "tell_error")])
def test_a_second_ctrl_c_does_not_end_it(of, name, converse, tmp_path, monkeypatch):
    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(of, name, interrupted)
    file = tmp_path / "a.json"
    said = converse("hello", "/nothing", "two", argv=(*GREEDY, "--stats", "--save", file))
    assert said.code == 0
    assert len(transcript(file)["messages"]) == 4


def test_ctrl_c_while_a_line_is_written_cuts_nothing(converse, tmp_path, monkeypatch):
    file, write = tmp_path / "a.json", Output.write

    def interrupted(self, text, **more):
        write(self, text[:10], **more)
        os.kill(os.getpid(), 2)
        write(self, text[10:], **more)

    monkeypatch.setattr(Output, "write", interrupted)
    said = converse("hello", "two", argv=(*GREEDY, "--json", "--save", file))
    assert said.code == 0
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [one["messages"][0]["content"] for one in lines] == ["hello", "two"]
    assert len(transcript(file)["messages"]) == 4


def test_memory_that_is_not_there_is_one_line(converse, tmp_path, monkeypatch):
    file, prefill, failed = tmp_path / "a.json", Session.prefill, []

    def full(self, *args, **more):
        if not failed:
            failed.append(True)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return prefill(self, *args, **more)

    monkeypatch.setattr(Session, "prefill", full)
    said = converse("hello", "two", argv=(*GREEDY, "--save", file))
    assert said.code == 0
    expected = r"(?m)^> error: out of memory: DefaultCPUAllocator.*\nhint: remove a turn with"
    assert re.search(expected, said.err)
    assert transcript(file)["messages"][0]["content"] == "two"


@pytest.mark.parametrize("error", [NotFinite("a NaN"), RuntimeError("broken")])
def test_an_answer_that_an_error_cuts_short_is_told_and_saved(error, chat, tmp_path, monkeypatch):
    file, choose, steps = tmp_path / "a.json", Sampler.pick, []

    def failing(self, *args):
        steps.append(True)
        if len(steps) == 4:
            raise error
        return choose(self, *args)

    monkeypatch.setattr(Sampler, "pick", failing)
    said = chat("--prompt", "hello", "-n", "8", "--json", "--save", file)
    line, failed = map(json.loads, said.out.splitlines())
    assert str(error) in failed["error"]["message"]
    assert line["tokens"]["generated"] == 3
    assert line["messages"][1]["finish_reason"] == "interrupted"
    assert transcript(file)["messages"] == line["messages"]


def test_what_a_shell_cannot_write_in_a_transcript(chat, converse):
    assert "`--stop` is not UTF-8 text" in chat("--prompt", "x", "--stop", "\udcff").err
    deep = "[" * 5000 + "]" * 5000
    assert "nested more than 32 deep" in chat("--prompt", "x", "--set", f"lead={deep}").err
    assert "nested more than 32 deep" in converse(f"/set lead {deep}").err


def answering(talker, *argv):
    """A process of its own that has begun to answer."""
    process = programs.start("chat", "-m", talker, "--prompt", "hello", *argv)
    assert process.stdout.read(1), "it answers"
    return process


def test_what_an_answer_has_at_sigterm_is_saved(talker, tmp_path):
    file, length = tmp_path / "talk.json", ("-n", "100000", "--context-length", "100000")
    more = ("--presence-penalty", "1", "--stop", "never")
    process = answering(talker, "--greedy", *length, *more, "--save", str(file), "-q")
    process.send_signal(15)
    programs.ended(process, 143)
    document = transcript(file)
    assert errors(document, "chat") == []
    assert document["messages"][1]["finish_reason"] == "interrupted"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_conversation_with_a_mark_in_front_is_loaded(converse, tmp_path, encoding):
    path, other = tmp_path / "c.json", tmp_path / "d.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "é"}]}), encoding)
    assert converse(f"/save {other}", argv=("--load", str(path), *GREEDY)).code == 0
    assert transcript(other)["messages"][0]["content"] == "é"


def test_the_file_follows_the_conversation(converse, tmp_path):
    file, seen = tmp_path / "talk.json", []

    def looked(line):
        seen.append(transcript(file) if file.exists() else None)
        return line

    lines = ("/system x", "hello", "two", "/undo", "/set seed 7", "/system brief", "/clear", "")
    converse(*(partial(looked, line) for line in lines), argv=(*GREEDY, "--save", file))
    assert seen[:2] == [None, None], "nothing is kept of what was never answered"
    assert [len(one["messages"]) for one in seen[2:]] == [3, 5, 3, 3, 3, 1]
    assert seen[6]["sampling"]["seed"] == 7
    assert seen[7]["messages"] == [{"role": "system", "content": "brief"}]
    before = file.stat().st_ino
    converse("/stats", argv=("--load", file, "--save", file))
    assert file.stat().st_ino == before, "nothing was changed"
    converse("/system other", argv=("--load", file, "--save", file))
    assert transcript(file)["messages"][0]["content"] == "other"


def test_of_a_long_conversation_the_end_is_looked_at(converse, monkeypatch):
    monkeypatch.setattr(slash, "_INSPECTED", 5)
    said = converse("hello", "/look lens", argv=(*GREEDY, "--json"))
    assert "note: the last 5 of" in said.err
    assert "settled: from this layer on" in said.err
    assert len(said.out.splitlines()) == 1


def test_a_damaged_transcript_is_one_line(converse, cli, talker, tmp_path, as_written):
    """What is changed in one and what `--load` says of it, in each line of a file.

    `generate -f` says so too where the file says that it is one. `[]`: a list of it.
    """
    converse("hello", argv=(*GREEDY, "--save", tmp_path / "right.json"))
    right, bad = transcript(tmp_path / "right.json"), tmp_path / "bad.json"
    file, found = Path(__file__).with_name("refused-transcripts.txt"), []
    for row in file.read_text("utf-8").splitlines():
        given = row.partition(" → ")[0]
        change = json.loads(given)
        if "sampling" in change:
            change["sampling"] = right["sampling"] | change["sampling"]
        bad.write_text(json.dumps(right | change if change else [right]))
        said = converse(argv=("--load", bad))
        assert said.code == 2
        error, _ = said.err.replace(f"`{bad}`", "F").splitlines()
        if "its `schema`" not in error:
            assert cli("generate", "-m", talker, "-f", bad, "x").err == said.err
        found.append(f"{given} → {error.removeprefix('error: ')}\n")
    as_written(file, "".join(found))


def test_a_conversation_on_a_terminal(talker, tmp_path, converse):
    file = tmp_path / "a.json"
    talk = Terminal(talker, *GREEDY, "--seed", "1", "--save", str(file), home=tmp_path)
    for text in ("/help lists the commands", PROMPT, "0 / 60"):  # the last column is written apart
        talk.wait(text)
    talk.type("hello\r", PROMPT)
    meter = re.search(r"(\d+) / 60$", talk.wait(" / 60"))[1]
    talk.type("/sta\t", "ts")
    shown = talk.type("\r", " of 600")
    assert "read 8 new of 8" in shown
    loaded = converse("/stats", "/tokens", argv=("--load", file)).out
    # every count of the context is the same
    assert re.findall(r"context +(\d+) +of 600", shown + loaded) == [meter] * 3
    talk.wait(PROMPT)
    talk.type("/nothing\r", "unknown command `/nothing`")
    talk.wait(PROMPT)
    (tmp_path / "notes.txt").write_text("plum")
    talk.type(f"see @{tmp_path}/not\t", "es.txt")
    talk.type("\r", PROMPT)
    talk.type("\x03")  # nothing runs: the line is cleared
    assert talk.end("\x04") == 0  # the end of input
    kept = (tmp_path / "llmcli" / "chat_history").read_text()
    for line in ("hello", "/stats", f"see @{tmp_path}/notes.txt"):
        assert f"+{line}\n" in kept


# llmcli that is killed as it takes a step of writing a file, or when half of that is written
KILLED = """
import io, os, signal, sys
from llmcli.__main__ import script
from llmcli.shell import files

step = sys.argv.pop(1)

def end():
    os.kill(os.getpid(), signal.SIGKILL)

def heard(event, of):
    if event == step:
        name = os.readlink(f"/proc/self/fd/{of[0]}") if isinstance(of[0], int) else str(of[0])
        name.endswith(".part") and end()

def half(file, data):
    io.FileIO.write(file, data[: len(data) // 2])
    end()

if step == "write":
    files._File.write = half
sys.addaudithook(heard)
script()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_at_any_step_no_transcript_is_half(converse, talker, tmp_path):
    """It is the old one or the new one, never a part; what was written of it goes later."""
    file, program = tmp_path / "talk.json", tmp_path / "scripted.py"
    program.write_text(KILLED)
    converse("hello", argv=(*GREEDY, "--save", file))
    old = file.read_bytes()
    words = ["chat", "-m", talker, "--prompt", "hello", *GREEDY, "--load", file, "--save", file]
    for step in ("open", "fcntl.flock", "write", "os.rename"):
        command = [sys.executable, str(program), step, *map(str, words)]
        done = children.run(command, capture_output=True)
        assert (done.returncode, done.stderr) == (-signal.SIGKILL, b""), step
        assert file.read_bytes() == old
        assert (step == "open") != any(path.suffix == ".part" for path in tmp_path.iterdir())
    converse("/clear", f"/save {file}")
    assert not any(path.suffix == ".part" for path in tmp_path.iterdir())


def test_where_no_history_can_be_kept_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = typed.history_path()
    assert path == tmp_path / "llmcli" / "chat_history"
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(path))  # a file, no folder
    assert typed.history_path() is None
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no home directory
    assert typed.history_path() is None
