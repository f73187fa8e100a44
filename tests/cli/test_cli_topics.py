"""`llmcli help`: topics on a terminal and in a pipe, the help of commands, and what it costs."""

from __future__ import annotations

import io
import sys
import tomllib
from pathlib import Path

import children
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from llmcli.cli.topics import TOPICS, spellings, topic_of
from llmcli.cli.tree import ENTRIES, NESTED
from llmcli.commands.help.view import drawn

ROOT = Path(__file__).parents[2]


def test_alone_it_lists_commands_and_topics(cli):
    result = cli("help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(cli("--help").out.rstrip())
    for name, topic in TOPICS.items():
        assert f"  {name} " in result.out
        assert topic.summary.split()[0] in result.out


@pytest.mark.parametrize("name", [*ENTRIES, *NESTED])
def test_of_a_command_it_is_what_the_command_says(cli, name):
    if topic_of(name.split()):  # models, shapes and attention are explained, and name the options
        assert f"`llmcli {name} --help`" in cli("help", name).out
        return
    assert cli("help", *name.split()).out == cli(*name.split(), "--help").out
    assert cli("help", "help").out == cli("help", "--help").out


@pytest.mark.parametrize("name", list(TOPICS))
def test_a_topic_is_plain_text_in_a_pipe(cli, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    result = cli("help", name)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("# ")
    assert "\x1b" not in result.out
    assert "<!--" not in result.out
    assert "```" not in result.out
    assert "\n\n\n" not in result.out
    assert max(map(cell_len, result.out.splitlines())) <= 80  # commands, too


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", list(TOPICS))
def test_a_topic_on_a_terminal(name, width):
    """Colours instead of markers, and no line of prose that is wider than the terminal."""
    from llmcli.cli.vocabulary import filled

    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system="standard",
        markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    text = drawn(filled(TOPICS[name].text()), console)
    assert "\x1b[1" in text
    assert "## " not in text
    plain = Text.from_ansi(text).plain.splitlines()
    prose = [line for line in plain if not line.startswith("    ")]
    assert max(map(cell_len, prose)) <= width


@pytest.mark.parametrize("said", [*spellings(), "Reading Attention", "shapes_and_names", "GGUF"])
def test_spellings(cli, said):
    topic = topic_of(said.split())
    assert topic is not None
    assert cli("help", *said.split()).out == cli("help", topic.name).out


def test_no_spelling_means_two_topics_and_none_hides_a_command():
    named = spellings()
    assert len(named) == len(set(named))
    assert {*ENTRIES} & {*named} == {"models", "shapes", "attention"}


def test_it_imports_no_torch_and_makes_no_request():
    code = (
        "import socket, sys\n"
        "def refused(*a, **k): raise SystemExit('the network')\n"
        "socket.socket.connect = refused\n"
        "from llmcli.cli.app import main\n"
        "for words in sys.argv[1:]: assert main(['help', *words.split()]) == 0\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subjects = ["", *TOPICS, "generate", "models pull"]
    done = children.run([sys.executable, "-c", code, *subjects], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_has_the_topics():
    """A file for each, and a pattern for them among the data of the package."""
    folder = ROOT / "llmcli" / "commands" / "help" / "topics"
    assert {file.stem for file in folder.glob("*")} == set(TOPICS)
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]["llmcli"]
    assert "commands/help/topics/*.md" in data
