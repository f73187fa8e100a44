"""`chat`: one turn, a conversation on a terminal, and transcripts that go on."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import children
import pytest
from cli_tiny import write_tiny
from json_schemas import errors

from llmcli.cli.chat import command as chat_command
from llmcli.cli.chat import commands

PROMPT = "\r\n>"  # at the beginning of a line
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


class Typed:
    """Lines for the prompt of a conversation, one after the other, and the drafts they replaced."""

    def __init__(self, *lines):
        self.lines, self.drafts = list(lines), []

    def send(self, draft):
        self.drafts.append(draft)
        return self.lines.pop(0) if self.lines else None


@pytest.fixture
def converse(cli, talker, monkeypatch):
    """A conversation of these lines, as a terminal would give them."""

    def run(*lines, argv=(), drafts=None):
        typed = Typed(*lines)
        monkeypatch.setattr(chat_command, "_lines", lambda: typed)
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        result = cli("chat", "-m", talker, "--seed", "1", *argv)
        if drafts is not None:
            drafts += typed.drafts
        return result

    return run


def test_one_turn(chat):
    said = chat("--prompt", "hello", *GREEDY)
    assert said.code == 0
    assert said.out.endswith("\n")
    line = chat("--prompt", "hello", *GREEDY, "--json").json()
    assert errors(line, "chat") == []
    assert line["messages"][0] == {"role": "user", "content": "hello"}
    content = line["messages"][1]["content"]
    assert said.out == content + "\n" * (not content.endswith("\n"))
    tokens = line["tokens"]
    assert tokens["prompt"] == tokens["computed"] == len("hello") + 3
    assert tokens["generated"] == len(line["messages"][1]["ids"])
    assert "read 8 new tokens of 8" in chat("--prompt", "hello", *GREEDY, "--stats").err


def test_a_file_and_a_pipe_are_one_message(cli, talker, tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("from a file\n")
    monkeypatch.setattr("llmcli.cli.chat.command.stdin_is_given", lambda stream: True)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
    said = cli("chat", "-m", talker, "-f", file, "--prompt", "and here", *GREEDY, "--json").json()
    assert said["messages"][0]["content"] == "from a pipe\nfrom a file\nand here"


def test_what_cannot_be_said(chat, tiny, cli, tmp_path):
    assert "nothing to say" in chat().err
    assert chat().code == 2
    bare = write_tiny(tmp_path / "bare", template=False, weights=True)
    assert "cannot be talked to" in cli("chat", "-m", bare, "--prompt", "x").err
    assert "no NAME=VALUE" in chat("--prompt", "x", "--set", "thinking").err
    assert "not empty" in chat("--prompt", "x", "--stop", "").err
    long = chat("--prompt", "x" * 700)
    assert (long.code, "more than the context of 600" in long.err) == (2, True)
    assert chat("--prompt", "x", "--save", str(tmp_path / "no" / "a.json")).code != 0


def test_a_conversation_reads_only_what_is_new(converse):
    said = converse("hello", "/stats", "and then?", "/stats", "/tokens", argv=GREEDY)
    assert said.code == 0
    first, second = re.findall(r"read (\d+) new tokens of (\d+)", said.out)[:2]
    assert first == ("8", "8")
    new, whole = map(int, second)
    # what is said, three special tokens around it, the last token of the answer before, which was
    # not read yet, and the end that it lacks where it was cut off
    assert new in (len("and then?") + 4, len("and then?") + 5)
    assert whole >= new + 8
    assert "assistant" in said.out


def test_commands_change_what_is_said(converse, tmp_path):
    drafts = []
    said = converse(
        "/system be brief", "hello", "/undo", "/undo", "/edit", "one", "/edit", "two",
        "/regen", "/clear", "/system none", "/set temperature 0.5", "/set lead true", "/set",
        "/set top_p 7", "/set top_p true", "/set seed 1.5", "/set nonsense", "/hepl",
        "/stats maybe", "/regen", "/load", "/save",
        argv=GREEDY, drafts=drafts,
    )  # fmt: skip
    assert "system: be brief" in said.out
    assert "taken back: hello" in said.out
    assert "system: none" in said.out
    assert "one" in drafts, "the message to edit is the next draft"
    assert "temperature         0.5" in said.out
    assert "lead                True  (of the template)" in said.out
    for line in (
        "error: there is nothing to take back",
        "error: there is nothing to edit",
        "error: `top_p` must be greater than 0 and at most 1, not `7`",
        "error: `top_p` must be greater than 0 and at most 1, not `true`",
        "error: `seed` must be a whole number, not `1.5`",
        "error: `/set` takes a name and a value",
        "error: there is no command `/hepl`",
        "hint: did you mean `/help`?",
        "error: `/stats` takes on or off",
        "error: there is nothing to answer",
        "error: `/load` takes the path of a file",
        "error: `/save` takes the path of a file",
    ):
        assert line in said.err, line


def test_help_names_every_command(converse):
    said = converse("/help", "/exit", "never said")
    for name in commands.COMMANDS:
        assert f"/{name}" in said.out
    assert "never said" not in said.out


def test_a_saved_conversation_goes_on_as_it_would_have(converse, tmp_path):
    file, other = tmp_path / "talk.json", tmp_path / "other.json"
    # float32: what is read at once and what is read step by step then agree, down to near ties
    sampling = ("-n", "8", "-t", "1", "--dtype", "float32")
    whole = converse("hello", "and then?", argv=(*sampling, "--save", file))
    right = json.loads(file.read_text())
    assert errors(right, "chat") == []
    assert [one["role"] for one in right["messages"]] == ["user", "assistant"] * 2
    converse("hello", argv=(*sampling, "--save", other))
    converse("and then?", argv=("--load", other, "--save", other, "--dtype", "float32"))
    found = json.loads(other.read_text())
    assert found["messages"] == right["messages"]
    assert found["sampling"] == right["sampling"]
    assert whole.code == 0


def test_a_draw_again_differs_and_is_kept(converse, tmp_path):
    file = tmp_path / "talk.json"
    converse("hello", "/regen", argv=("-n", "8", "-t", "1", "--save", file))
    found = json.loads(file.read_text())
    assert found["answers"] == 2
    assert len(found["messages"]) == 2
    converse("hello", argv=("-n", "8", "-t", "1", "--save", file))
    assert json.loads(file.read_text())["messages"][1] != found["messages"][1]


def damaged(**changes):
    return lambda document: document | changes


DAMAGE = {
    "no object": lambda document: [document],
    "another schema": damaged(schema="llmcli.generate/1"),
    "no model": damaged(model=None),
    "no messages": damaged(messages={}),
    "another role": damaged(messages=[{"role": "tool", "content": ""}]),
    "no content": damaged(messages=[{"role": "user"}]),
    "a system message that comes late": damaged(
        messages=[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    ),
    "ids of the user": damaged(messages=[{"role": "user", "content": "a", "ids": [1]}]),
    "ids beyond the vocabulary": damaged(
        messages=[{"role": "assistant", "content": "a", "ids": [10**6]}]
    ),
    "ids that are no numbers": damaged(
        messages=[{"role": "assistant", "content": "a", "ids": [True]}]
    ),
    "an unknown end": damaged(
        messages=[{"role": "assistant", "content": "a", "finish_reason": "tired"}]
    ),
    "a seed below 0": lambda d: d | {"sampling": d["sampling"] | {"seed": -1}},
    "a temperature that is no number": lambda d: (
        d | {"sampling": d["sampling"] | {"temperature": "hot"}}
    ),
    "no stop strings": lambda d: d | {"sampling": d["sampling"] | {"stop": [""]}},
    "no variables": damaged(variables=[]),
    "answers that are no number": damaged(answers=True),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved") / "talk.json"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_transcript_is_one_line(damage, converse, saved):
    if not saved.exists():
        converse("hello", argv=(*GREEDY, "--save", saved))
    document = DAMAGE[damage](json.loads(saved.read_text()))
    bad = saved.with_name("bad.json")
    bad.write_text(json.dumps(document))
    said = converse(argv=("--load", bad))
    assert said.code == 2
    assert said.err.startswith(f"error: `{bad}` is no transcript of `llmcli chat`: ")
    assert len(said.err.splitlines()) == 2


def test_another_models_answers_are_read_as_text(converse, saved, tmp_path):
    converse("hello", argv=(*GREEDY, "--save", saved))
    document = json.loads(saved.read_text())
    document["model"]["name"] = "another"
    file = tmp_path / "other.json"
    file.write_text(json.dumps(document))
    said = converse("and then?", argv=("--load", file, *GREEDY))
    assert (said.code, "`another` wrote the answers" in said.err) == (0, True)


class Terminal:
    """`llmcli chat` on a terminal of its own."""

    def __init__(self, talker, *argv, home):
        self.controller, inner = pty.openpty()
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


def test_a_conversation_on_a_terminal(talker, tmp_path):
    talk = Terminal(talker, *GREEDY, "--seed", "1", home=tmp_path)
    talk.wait("/help lists the commands")
    talk.wait(PROMPT)
    talk.type("hello\r")
    talk.wait(PROMPT)
    talk.type("/stats\r")
    assert "read 8 new tokens of 8" in talk.wait(" of 600 tokens")
    talk.wait(PROMPT)
    talk.type("/nothing\r")
    talk.wait("there is no command `/nothing`")
    talk.wait(PROMPT)
    talk.type("\x03")  # nothing runs: the line is cleared
    talk.type("/exit\r")
    assert talk.end() == 0
    kept = (tmp_path / "llmcli" / "chat_history").read_text()
    assert "+hello" in kept
    assert "+/stats" in kept


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(talker, tmp_path):
    file = tmp_path / "talk.json"
    talk = Terminal(
        talker, "-t", "1", "-n", "500", "--stop", "never that", "--seed", "3",
        "--save", str(file), home=tmp_path,
    )  # fmt: skip
    talk.wait(PROMPT)
    talk.type("hello\r")
    time.sleep(0.5)
    talk.process.send_signal(2)
    talk.wait(PROMPT)
    talk.type("/exit\r")
    assert talk.end() == 0
    if file.exists():
        assert errors(json.loads(file.read_text()), "chat") == []


def test_the_end_of_input_ends_it(talker, tmp_path):
    talk = Terminal(talker, *GREEDY, home=tmp_path)
    talk.wait(PROMPT)
    talk.type("\x04")
    assert talk.end() == 0


def test_killed_at_any_moment_no_transcript_is_half(talker, tmp_path):
    file = tmp_path / "talk.json"
    for wait in (0.0, 0.02, 0.1):
        process = children.start(
            [sys.executable, "-m", "llmcli", "chat", "-m", talker, "--prompt", "hello",
             *GREEDY, "--save", str(file)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        process.stdout.read(1)  # it answers
        time.sleep(wait)
        process.kill()
        process.wait()
        if file.exists():
            assert errors(json.loads(file.read_text()), "chat") == []


def test_where_no_history_can_be_kept_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = chat_command.history_path()
    assert path == tmp_path / "llmcli" / "chat_history"
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(path))  # a file, no folder
    assert chat_command.history_path() is None
