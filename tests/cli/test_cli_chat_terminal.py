"""`chat` and `generate` on their terminal: keys, signals, widths, and what is shown of answers."""

import io
import json
import re
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from chat_terminal import PROMPT, Keyboard, Terminal
from cli_tiny import TEMPLATE, write_tiny
from covers import few, in_turn
from json_schemas import errors
from scripted import speak

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.chat.slash import COMMANDS
from llmcli.commands.chat.typed import EditedLines
from llmcli.errors import NotFinite
from llmcli.shell.exits import Signals
from llmcli.shell.streams import KEYS
from llmcli.text import load_tokenizer

WORDS = " ".join(f"word{number}" for number in range(40))
THOUGHT = "<think>\nHm, *so*.\nWell.\n</think>\n\nYes, **it** is.\n- one"
DIM = "\x1b[2m"
END = 0


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A model whose template speaks of reasoning and of tools."""
    template = TEMPLATE + "{# <think> </think> <tool_call> #}"
    folder = tmp_path_factory.mktemp("talker") / "m"
    return str(write_tiny(folder, weights=True, max_position_embeddings=900, template=template))


@pytest.fixture(scope="module")
def spelled(talker):
    tokenizer = load_tokenizer(open_checkpoint(Path(talker), weights=False))
    return lambda text: [*tokenizer.encode(text, add_bos=False), END]


@pytest.fixture
def chat(talker, spelled, tmp_path):
    """A conversation on a terminal of its own, with these answers, at its first prompt if any."""

    def run(*answers, argv=(), **how):
        spoken = [spelled(one) if isinstance(one, str) else one for one in answers]
        talk = Terminal(talker, *argv, home=tmp_path, spoken=spoken, **how)
        if "--prompt" not in argv:
            talk.wait(PROMPT)
        return talk

    return run


@pytest.fixture
def saved(tmp_path):
    """What saves a conversation, and its messages there."""

    def messages():
        document = json.loads((tmp_path / "a.json").read_text())
        assert errors(document, "chat") == []
        return document["messages"]

    return ("--save", str(tmp_path / "a.json")), messages


@pytest.fixture
def shown(cli, talker, spelled, monkeypatch):
    """What one run in this process shows of its answers, on a terminal without an editor."""

    def run(*answers, argv=("--prompt", "hi"), columns=40, lines=()):
        speak(
            monkeypatch.setattr, (spelled(one) if isinstance(one, str) else one for one in answers)
        )
        monkeypatch.setattr("sys.stdin", Keyboard(lines) if lines else io.StringIO(""))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        return cli("chat", "-m", talker, *argv)

    return run


def test_keys_during_an_answer_are_for_the_next_prompt(chat):
    talk = chat(WORDS, "Yes.")
    talk.type("hello\r", "word1")
    assert "then" not in talk.type("and n\x7fthen\r", PROMPT)
    for shown in ("and then", "Yes.", PROMPT):
        talk.wait(shown)
    assert talk.end("/exit\r") == 0


def test_ctrl_c_is_not_echoed_and_said_on_a_line_of_its_own(chat, saved):
    save, messages = saved
    talk = chat(WORDS, argv=save)
    talk.type("hello\r", "word3")
    seen = talk.type("\x03", PROMPT)
    assert "^C" not in seen
    assert "\r\ninterrupted\r\n" in seen
    assert talk.end("/exit\r") == 0
    assert messages()[1]["finish_reason"] == "interrupted"


ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.parametrize(("number", "when"), [
    *in_turn(ENDS, ["an answer", "the only answer"]),
    *few([pytest.param(number, "a prompt") for number in ENDS[1:]], 1),
])  # fmt: skip
def test_the_terminal_is_as_before_whatever_ends_it(chat, number, when):
    talk = chat(WORDS, argv=("--prompt", "hello") if when == "the only answer" else ())
    if when == "an answer":
        talk.type("hello\r")
    if when != "a prompt":
        talk.wait("word3")
    assert not talk.restored()
    talk.process.send_signal(number)
    if when == "an answer" and number == signal.SIGINT:
        talk.wait(PROMPT)
        talk.type("/exit\r")
    assert talk.end() in ((0, 130) if number == signal.SIGINT else (143, -signal.SIGQUIT))
    if when == "a prompt":  # nothing that is pasted is marked any longer
        assert "\x1b[?2004h" in talk.raw
        assert talk.raw.rfind("\x1b[?2004l") > talk.raw.rfind("\x1b[?2004h")


def test_an_end_that_unwinds_nothing_restores_the_terminal(monkeypatch):
    done = Mock()
    done.exit.side_effect = SystemExit
    monkeypatch.setattr(KEYS, "restore", done.restore)
    monkeypatch.setattr("os._exit", done.exit)
    signals = Signals()
    signals.over = True
    with pytest.raises(SystemExit):
        signals._handle(signal.SIGINT, None)
    assert done.mock_calls == [call.restore(), call.exit(130)]


def test_ctrl_z_suspends_during_an_answer_and_at_the_prompt(chat):
    twice = "stty -a; echo on; fg; " * 2
    talk = chat(WORDS, shell=f"set -m; eval $0; {twice}echo code $?")
    for when in ("during an answer", "at the prompt"):
        if when == "during an answer":
            talk.type("hello\r", "word3")
        modes = talk.type("\x1a", "on\r\n")
        assert " echo " in modes
        assert " icanon " in modes
        if when == "during an answer":
            talk.wait("word39")
        talk.wait(PROMPT)
    talk.type("/exit\r", "code 0")
    talk.end()


def test_another_width_holds_for_the_lines_that_follow(chat):
    """Of reasoning, and of an answer."""
    talk = chat(f"<think>{WORDS}", WORDS, COLUMNS="")
    for reasoning in (True, False):
        talk.resize(100)
        before = talk.type("hello\r", "word20")
        assert ("thinking" in before) is reasoning
        talk.resize(40)
        talk.wait("\n")
        after = talk.wait("word39")
        assert max(map(len, before.splitlines())) > 60
        assert 30 < max(map(len, after.splitlines())) <= 40
        talk.wait(PROMPT)
    assert talk.end("/exit\r") == 0


def test_a_dumb_terminal_gets_bare_lines(chat, saved):
    save, messages = saved
    talk = chat("One.", "Two.", "Three.", argv=save, TERM="dumb")
    for keys in ("hel\x7flo\r", "a\\\rb\r", "/edit\r", "/reasoning\r", '"""\rc\r"""\r'):
        talk.type(keys, PROMPT)
    assert "Ctrl-D or /exit ends" in talk.type("\x03", PROMPT)
    assert talk.end("\x04") == 0
    assert not re.search("\x1b|/ 900", talk.raw)
    assert "\r\na\r\nb\r\n> " in talk.raw, "the draft of /edit"
    assert [one["content"] for one in messages()[::2]] == ["helo", "a\nb", "c"]


def test_lines_go_on_behind_a_backslash_and_in_quotes(chat, saved):
    save, messages = saved
    talk = chat("One.", "Two.", argv=save)
    for keys in ("a\\\rb\r", '"""\rc \\\r"""\r'):
        talk.type(keys, PROMPT)
    assert "Ctrl-D or /exit ends" in talk.type("\x03", PROMPT)
    assert "Ctrl-D" not in talk.type("\x03", PROMPT), "once"
    assert talk.end("\x04") == 0
    assert [one["content"] for one in messages()[::2]] == ["a\nb", "c \\"]


def test_completion(tmp_path, monkeypatch, as_written):
    """What is typed, and the line with the only thing that is offered, in each line of a file."""
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "nested").mkdir()
    for name in ("file with spaces.json", "nested/other", "nested/t o"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    talk = SimpleNamespace(
        conversation=SimpleNamespace(template_variables=lambda: frozenset({"lead"}))
    )
    values = {name: one.values and partial(one.values, talk) for name, one in COMMANDS.items()}
    completer, found = EditedLines(values, print)._session.completer, []
    file = Path(__file__).with_name("completed-chat.txt")
    for row in file.read_text("utf-8").splitlines():
        typed = row.partition(" → ")[0]
        offered = completer.get_completions(Document(typed), CompleteEvent())
        lines = (f"{typed[: len(typed) + one.start_position]}{one.text}" for one in offered)
        found.append(f"{typed} → {' or '.join(lines)}\n")
    as_written(file, "".join(found))


MARKED = {  # special tokens, which a text leaves out, and what a template puts first
    "magistral": (("[THINK]", "[/THINK]"), "[THINK]a b[/THINK]c d", ""),
    "begun": (("[THINK]", "[/THINK]"), "a b[/THINK]c d", "[THINK]"),
    "gemma": (("<|channel>", "<channel|>"), "<|channel>thought\na b<channel|>c d", ""),
    "gpt-oss": (
        ("<|channel|>", "<|message|>", "<|start|>"),
        "<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>c d",
        "",
    ),
}


@pytest.mark.parametrize("name", MARKED)
def test_markers_that_are_special_tokens_part_the_text_of_generate(
    name, cli, tmp_path, monkeypatch
):
    special, written, lead = MARKED[name]
    signs = "<|channel|>analysis<|message|>" if name == "gpt-oss" else "".join(special)
    folder = write_tiny(
        tmp_path / "m", special=special, weights=True, eos_token_id=1, eos="<|user|>",
        template=f"{TEMPLATE}{lead}{{# {signs} #}}",
    )  # fmt: skip
    tokenizer = load_tokenizer(open_checkpoint(folder, weights=False))
    ids = tokenizer.encode(written, add_bos=False)
    assert tokenizer.special_ids & set(ids)
    batch = tmp_path / "batch.jsonl"
    batch.write_text('"hi"\n')

    def run(*argv):
        speak(monkeypatch.setattr, [[*ids, 1]])
        return cli(*argv, "-m", str(folder))

    assert run("generate", "hi").out == written, "nothing is lost in a pipe"
    assert run("generate", "hi", "--raw").out == written
    for argv in (("hi",), ("--batch", str(batch))):
        document = run("generate", *argv, "--json").json()
        assert errors(document, "generate") == []
        output = document["outputs"][0]
        assert (output["content"], output["reasoning"]) == ("c d", "a b")
        assert output["text"] == written
    lines = [json.loads(line) for line in run("generate", "hi", "--stream-json").out.splitlines()]
    joined = {part: "".join(line[part] for line in lines) for part in ("content", "reasoning")}
    assert joined == {"content": "c d", "reasoning": "a b"}
    said = run("chat", "--prompt", "hi", "--json").json()["messages"][1]
    assert (said["content"], said["reasoning"]) == ("c d", "a b")
    (raw,) = run("generate", "hi", "--raw", "--json").json()["outputs"]
    assert "content" not in raw, "not an answer"


def test_folded_reasoning_is_one_line(shown):
    fold = ("--prompt", "hi", "--reasoning", "fold")
    line, _, answer = shown(THOUGHT, argv=fold).out.partition("\n")
    steps = [re.sub(r"\x1b\[\d*m", "", one) for one in line.split("\r")]
    assert re.fullmatch(r"thought: 1\d tokens, \d\.\d s *", steps[-1])
    assert all(re.fullmatch(r"(thinking … [\d]+ tokens?, \d\.\d s)? *", one) for one in steps[:-1])
    assert answer.startswith("\nYes, ")


def test_lines_of_commands_break_between_words(shown, monkeypatch):
    def narrower():
        monkeypatch.setenv("COLUMNS", "30")
        return f"/system {'word ' * 30}"

    monkeypatch.setenv("TERM", "dumb")
    lines = ("a", "/stats", "/tokens", "/help", narrower)
    out = re.sub("(?m)^> ", "", shown("No.", argv=(), columns=60, lines=lines).out)
    wide, narrow = out.split("system: ")
    assert max(map(len, wide.splitlines())) <= 60
    assert 20 < max(map(len, narrow.splitlines())) <= 30
    assert not re.search(r"\w\n\w", narrow)


def test_an_error_keeps_what_was_written(shown, spelled):
    def broken():
        yield from spelled("One two")[:-1]
        raise NotFinite("the logits are no numbers")

    said = shown(broken())
    assert (said.code, said.out) == (7, "One two\n")
    assert said.err.startswith("error: the logits are no numbers\n")


NARROW = {"argv": ("--prompt", "hi"), "pace": 0.01, "COLUMNS": "30"}  # one turn


def test_nothing_that_was_shown_is_changed(chat):
    talk = chat(THOUGHT, **NARROW)
    assert talk.end() == 0
    answer = talk.raw[talk.raw.index("thinking") :]
    assert set(re.findall(r"\x1b[^m]*m|\r(?!\n)", answer)) <= {DIM, "\x1b[1m", "\x1b[0m"}
    assert "is.\r\n" in answer


@pytest.mark.parametrize(("before", "argv", "shown"), [
    ("", (), r"One two x{9}\r\n"),
    ("<think>", ("--reasoning", "fold"), r"thought: \d+ tokens, \d\.\d s"),
])
def test_ctrl_c_flushes_the_last_word(before, argv, shown, chat, spelled):
    how = NARROW | {"argv": (*NARROW["argv"], *argv)}
    talk = chat([*spelled(f"{before}One two " + "x" * 9)[:-1], -signal.SIGINT], **how)
    assert talk.end() == 130
    assert re.search(shown, talk.raw), talk.raw
