"""`chat` and the terminal that it runs on: keys during an answer, Ctrl-C, Ctrl-Z, other widths."""

import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_terminal import PROMPT, Terminal
from cli_tiny import TEMPLATE, write_tiny
from covers import few, in_turn

from llmcli.checkpoints import open_checkpoint
from llmcli.cli.exits import Signals
from llmcli.cli.keys import KEYS
from llmcli.commands.chat.slash import COMMANDS, completions
from llmcli.commands.chat.typed import EditedLines
from llmcli.text import load_tokenizer

WORDS = " ".join(f"word{number}" for number in range(60))


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talker") / "m"
    write_tiny(folder, weights=True, max_position_embeddings=900)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE + "{# <think> </think> #}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module")
def spelled(talker):
    tokenizer = load_tokenizer(open_checkpoint(Path(talker), weights=False))
    return lambda text: [*tokenizer.encode(text, add_bos=False), 0]


@pytest.fixture
def chat(talker, spelled, tmp_path):
    def run(*answers, argv=(), **how):
        return Terminal(
            talker, *argv, home=tmp_path, spoken=[spelled(text) for text in answers], **how
        )

    return run


def test_keys_during_an_answer_are_for_the_next_prompt(chat):
    talk = chat(WORDS, "Yes.")
    talk.wait(PROMPT)
    talk.type("hello\r")
    talk.wait("word1")
    talk.type("and n\x7fthen\r")
    assert "then" not in talk.wait(PROMPT)
    talk.wait("and then")
    talk.wait("Yes.")
    talk.wait(PROMPT)
    talk.type("/exit\r")
    assert talk.end() == 0


def test_ctrl_c_is_not_echoed_and_said_on_a_line_of_its_own(chat):
    talk = chat(WORDS)
    talk.wait(PROMPT)
    talk.type("hello\r")
    talk.wait("word3")
    talk.type("\x03")
    seen = talk.wait(PROMPT)
    assert "^C" not in seen
    assert "\r\ninterrupted\r\n" in seen
    talk.type("/exit\r")
    talk.process.wait(timeout=60)
    assert talk.restored()
    assert talk.end() == 0


@pytest.mark.parametrize(
    ("number", "argv"),
    in_turn(
        [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT],
        [(), ("--prompt", "hello")],
    ),
)
def test_the_terminal_is_as_before_whatever_ends_it(chat, argv, number):
    talk = chat(WORDS, argv=argv)
    if not argv:
        talk.wait(PROMPT)
        talk.type("hello\r")
    talk.wait("word3")
    assert not talk.restored()
    talk.process.send_signal(number)
    if not argv and number == signal.SIGINT:
        talk.wait(PROMPT)
        talk.type("/exit\r")
    code = talk.process.wait(timeout=60)
    assert code in (0, 130) if number == signal.SIGINT else code in (143, -signal.SIGQUIT)
    assert talk.restored()
    talk.end()


@pytest.mark.parametrize("number", few([signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], 1))
def test_the_terminal_is_as_before_whatever_ends_a_prompt(chat, number):
    talk = chat(WORDS)
    talk.wait(PROMPT)
    assert not talk.restored()
    talk.process.send_signal(number)
    assert talk.process.wait(timeout=60) in (143, -signal.SIGQUIT)
    assert talk.restored()
    talk.end()
    assert "\x1b[?2004h" in talk.raw
    # nothing that is pasted is marked any longer
    assert talk.raw.rfind("\x1b[?2004l") > talk.raw.rfind("\x1b[?2004h")


def test_an_end_that_unwinds_nothing_restores_the_terminal(monkeypatch):
    class Ended(Exception):
        pass

    def ended(code):
        raise Ended(code)

    done = []
    monkeypatch.setattr(KEYS, "restore", lambda: done.append("restored"))
    monkeypatch.setattr("os._exit", ended)
    signals = Signals()
    signals.over = True
    with pytest.raises(Ended, match="130"):
        signals._handle(signal.SIGINT, None)
    assert done == ["restored"]


@pytest.mark.parametrize("when", few(["during an answer", "at the prompt"], 1))
def test_ctrl_z_suspends(chat, when):
    talk = chat(WORDS, shell="set -m; eval $0; stty -a; echo on; fg; echo code $?")
    talk.wait(PROMPT)
    if when == "during an answer":
        talk.type("hello\r")
        talk.wait("word3")
    talk.type("\x1a")
    modes = talk.wait("on\r\n")
    assert " echo " in modes
    assert " icanon " in modes
    if when == "during an answer":
        talk.wait("word59")
    talk.wait(PROMPT)
    talk.type("/exit\r")
    talk.wait("code 0")
    assert talk.restored()
    talk.end()


@pytest.mark.parametrize("lead", few(["<think>", ""], 1))
def test_another_width_holds_for_the_lines_that_follow(chat, lead):
    talk = chat(lead + WORDS, WORDS, COLUMNS="")
    talk.wait(PROMPT)
    talk.type("hello\r")
    before = talk.wait("word20")
    assert ("thinking" in before) is bool(lead)
    talk.resize(40)
    talk.wait("\n")
    after = talk.wait("word59")
    assert max(map(len, before.splitlines())) > 60
    assert 30 < max(map(len, after.splitlines())) <= 40
    talk.wait(PROMPT)
    talk.type("/exit\r")
    assert talk.end() == 0


def said(talk, text, then=PROMPT):
    """What is on the screen once `text` was typed and the next prompt is there."""
    talk.type(text)
    return talk.wait(then)


def test_a_dumb_terminal_gets_bare_lines(chat, tmp_path):
    talk = chat("One.", "Two.", "Three.", argv=("--save", str(tmp_path / "a.json")), TERM="dumb")
    talk.wait(PROMPT)
    said(talk, "hel\x7flo\r")
    said(talk, "a\\\rb\r")
    said(talk, "/edit\r")
    said(talk, "/reasoning\r")
    said(talk, '"""\rc\r"""\r')
    assert "Ctrl-D or /exit ends" in said(talk, "\x03")
    talk.type("\x04")
    talk.process.wait(timeout=60)
    assert talk.restored()
    assert talk.end() == 0
    assert not re.search("\x1b|/ 900", talk.raw)
    assert "\r\na\r\nb\r\n> " in talk.raw, "the draft of /edit"
    messages = json.loads((tmp_path / "a.json").read_text())["messages"]
    assert [one["content"] for one in messages[::2]] == ["helo", "a\nb", "c"]


def test_lines_go_on_behind_a_backslash_and_in_quotes(chat, tmp_path):
    talk = chat("One.", "Two.", argv=("--save", str(tmp_path / "a.json")))
    talk.wait(PROMPT)
    said(talk, "a\\\rb\r")
    said(talk, '"""\rc \\\r"""\r')
    assert "Ctrl-D or /exit ends" in said(talk, "\x03")
    assert "Ctrl-D" not in said(talk, "\x03"), "once"
    talk.type("\x04")
    assert talk.end() == 0
    messages = json.loads((tmp_path / "a.json").read_text())["messages"]
    assert [one["content"] for one in messages[::2]] == ["a\nb", "c \\"]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("/load fi\t", "/load file with spaces.json"), ("/save nes\t", "/save nested"),
        ("/look ti\t", "/look timing"), ("/look e\t", "/look experts"),
        ("/set tem\t", "/set temperature"),
        ("/set le\t", "/set lead"), ("/reasoning f\t", "/reasoning fold"),
        ("see @fi\t", 'see @"file with spaces.json"'),
        ("see @'fi\t", "see @'file with spaces.json"),
        ("see @nested/o\t", "see @nested/other"), ("see @nested/t\t", 'see @"nested/t o"'),
    ],
)  # fmt: skip
def test_completion(keys, line, tmp_path, monkeypatch):
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
    lines = EditedLines(tuple(COMMANDS), lambda name: completions(talk, name), print)
    document = Document(keys.rstrip("\t"))
    (found,) = lines._session.completer.get_completions(document, CompleteEvent())
    at = len(document.text) + found.start_position
    assert document.text[:at] + found.text == line
