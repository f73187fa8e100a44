"""`chat` and `generate` on a screen and in a pipe: reasoning apart from the answer, Markdown."""

import io
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_terminal import Terminal
from cli_tiny import TEMPLATE, write_tiny
from json_schemas import errors
from scripted import speak

from llmcli.checkpoints import open_checkpoint
from llmcli.commands.chat import command
from llmcli.errors import NotFinite
from llmcli.text import load_tokenizer

THOUGHT = "<think>\nHm, *so*.\nWell.\n</think>\n\nYes, **it** is.\n- one"
DIM = "\x1b[2m"
END = 0


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A model whose template speaks of reasoning and of tools."""
    folder = write_tiny(
        tmp_path_factory.mktemp("thinker") / "m", weights=True, max_position_embeddings=900
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE + "{# <think> </think> <tool_call> #}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module")
def spelled(thinker):
    tokenizer = load_tokenizer(open_checkpoint(Path(thinker), weights=False))
    return lambda text: [*tokenizer.encode(text, add_bos=False), END]


@pytest.fixture
def chat(cli, thinker, spelled, monkeypatch):
    """The answers to the messages of one run, as a terminal or a pipe gets them."""

    def run(answer, *argv, terminal=False, columns=40, lines=()):
        texts = [answer] if isinstance(answer, str) else answer
        speak(monkeypatch.setattr, (spelled(one) if isinstance(one, str) else one for one in texts))
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
        monkeypatch.setenv("COLUMNS", str(columns))
        if not lines:
            return cli("chat", "-m", thinker, "--prompt", "hi", *argv)
        typed = iter(lines)
        asks = SimpleNamespace(ask=lambda *more: next(typed, None), choose=None)
        monkeypatch.setattr(command, "lines_of", lambda *how: asks)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        return cli("chat", "-m", thinker, *argv)

    return run


def test_a_newline_at_the_end_is_not_doubled_in_a_pipe(chat):
    assert chat("No.\n").out == "No.\n"
    call = 'I look.\n<tool_call>\n{"a": 1}\n</tool_call>\n'
    assert chat(f"<think>a</think>{call}").out == call
    assert chat(call, terminal=True, columns=60).out.endswith("</tool_call>\x1b[0m\n\n")


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
    folder = write_tiny(tmp_path / "m", special=special, weights=True, eos_token_id=1)
    signs = "<|channel|>analysis<|message|>" if name == "gpt-oss" else "".join(special)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = f"{TEMPLATE}{lead}{{# {signs} #}}"
    settings["eos_token"] = "<|user|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(open_checkpoint(folder, weights=False))
    ids = tokenizer.encode(written, add_bos=False)
    assert tokenizer.special_ids & set(ids)
    batch = tmp_path / "batch.jsonl"
    batch.write_text('"hi"\n')

    def run(*argv, prompt=("hi",)):
        speak(monkeypatch.setattr, [[*ids, 1]])
        return cli("generate", *prompt, "-m", str(folder), *argv)

    assert run().out == written, "nothing is lost in a pipe"
    assert run("--raw").out == written
    for document in (
        run("--json").json(),
        run("--batch", str(batch), "--json", prompt=()).json(),
    ):
        assert errors(document, "generate") == []
        output = document["outputs"][0]
        assert (output["content"], output["reasoning"]) == ("c d", "a b")
        assert output["text"] == written
    lines = [json.loads(line) for line in run("--stream-json").out.splitlines()]
    joined = {part: "".join(line[part] for line in lines) for part in ("content", "reasoning")}
    assert joined == {"content": "c d", "reasoning": "a b"}
    speak(monkeypatch.setattr, [[*ids, 1]])
    said = cli("chat", "--prompt", "hi", "-m", str(folder), "--json").json()["messages"][1]
    assert (said["content"], said["reasoning"]) == ("c d", "a b")
    assert "content" not in run("--raw", "--json").json()["outputs"][0], "not an answer"


def test_folded_reasoning_is_one_line(chat):
    out = chat(THOUGHT, "--reasoning", "fold", terminal=True).out
    line, _, answer = out.partition("\n")
    shown = [re.sub(r"\x1b\[\d*m", "", one) for one in line.split("\r")]
    assert re.fullmatch(r"thought: 1\d tokens, \d\.\d s *", shown[-1])
    assert all(re.fullmatch(r"(thinking … [\d]+ tokens?, \d\.\d s)? *", one) for one in shown[:-1])
    assert answer.startswith("\nYes, ")


def test_lines_of_commands_break_between_words(chat, monkeypatch):
    def lines():
        yield from ("a", "/stats", "/tokens", "/help")
        monkeypatch.setenv("COLUMNS", "30")
        yield f"/system {'word ' * 30}"

    out = chat("No.", terminal=True, columns=60, lines=lines()).out
    wide, narrow = out.split("system: ")
    assert max(map(len, wide.splitlines())) <= 60
    assert 20 < max(map(len, narrow.splitlines())) <= 30
    assert not re.search(r"\w\n\w", narrow)


def test_an_error_keeps_what_was_written(chat, spelled):
    def broken():
        yield from spelled("One two")[:-1]
        raise NotFinite("the logits are no numbers")

    said = chat([broken()], terminal=True)
    assert (said.code, said.out) == (7, "One two\n")
    assert said.err.startswith("error: the logits are no numbers\n")


def test_control_characters_never_reach_a_terminal_that_folds(chat):
    hostile = "<think>a\x1b[2J\r</think>b\x1b]0;x\x07\n```\x1b\n\x9b\n```\n| \x1b |"
    out = chat(hostile, "--reasoning", "fold", terminal=True).out
    seen = re.sub(r"\x1b\[\d*m|\r(?=[\x1b ]|th)", "", out)
    assert all(one == "\n" or one.isprintable() for one in seen)


@pytest.fixture
def narrow(thinker, spelled, tmp_path):
    """A turn on a terminal of its own with 30 columns."""
    return lambda answer, *argv: Terminal(
        thinker, "--prompt", "hi", *argv, home=tmp_path, spoken=[spelled(answer)], pace=0.01,
        COLUMNS="30",
    )  # fmt: skip


def test_nothing_that_was_shown_is_changed(narrow):
    talk = narrow(THOUGHT)
    assert talk.end() == 0
    answer = talk.raw[talk.raw.index("thinking") :]
    assert set(re.findall(r"\x1b[^m]*m|\r(?!\n)", answer)) <= {DIM, "\x1b[1m", "\x1b[0m"}
    assert "is.\r\n" in answer


@pytest.mark.parametrize(
    ("before", "argv", "stop_at", "shown"),
    [
        ("", (), "two", r"One two x+\r\n"),
        ("<think>", ("--reasoning", "fold"), "thinking", r"thought: \d+ tokens, \d\.\d s"),
    ],
)
def test_ctrl_c_flushes_the_last_word(before, argv, stop_at, shown, narrow):
    talk = narrow(f"{before}One two " + "x" * 300, *argv)
    talk.wait(stop_at)
    time.sleep(0.2)  # for some more tokens
    talk.process.send_signal(2)
    assert talk.end() == 130
    assert re.search(shown, talk.raw.replace("\r\nx", " x")), talk.raw
