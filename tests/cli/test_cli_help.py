"""Help, topics and version: what they say, what they import, how long they take."""

from __future__ import annotations

import importlib
import io
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import children
import pytest
from cli_tiny import write_tiny
from covers import few
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from llmcli import __version__
from llmcli.cli.group import build
from llmcli.cli.help import TOPICS, drawn, topic_of
from llmcli.cli.tree import ENTRIES, NESTED
from llmcli.cli.vocabulary import filled

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "safetensors", "huggingface_hub", "tokenizers", "jinja2", "gguf",
         "rich", "pydantic", "transformers")  # fmt: skip
# before there is a process for each: what all of them import, and a name that another program says
PROBE = f"""
import platform, llmcli.shell.options
from llmcli.cli.app import main
platform.processor()
{children.EACH}
import socket
def refused(*a, **k): raise SystemExit("the network")
socket.socket.connect = refused
code = main(words.split())
print("LOADED", code, *sys.modules, file=sys.stderr)
"""


def probe(*commands):
    """The exit code of each, and the modules that were imported."""
    done = children.run(
        [sys.executable, "-c", PROBE, *commands], capture_output=True, text=True, cwd=ROOT,
        stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("LOADED ")]
    return [(int(code), modules) for _, code, *modules in lines]


@pytest.fixture
def dbrx(tmp_path):
    """A model of an architecture that is not supported."""
    return str(write_tiny(tmp_path / "m", model_type="dbrx"))


# a command, its exit code, and what it does not import: of each kind the first, and the others
LIGHT = [
    *((words, 0, HEAVY) for words in ("--help", "--version")),
    ("nonsense", 2, HEAVY), ("env", 0, ("torch", "pydantic")),
    ("--show-completion bash", 0, ("torch", "pydantic")),
    ("generate --top-k x", 2, ("torch", "pydantic")),
    # what is known without weights
    *((words, 0, ("torch",)) for words in (
        "info -m TINY", "shapes --json -m TINY", "shapes hello -m TINY",
    )),
    ("tokens hello -m TINY", 0, ("torch", "numpy")),
    ("models list", 0, ("torch", "httpx", "gguf", "transformers")),
    # the second model is refused before the first is loaded
    ("score hello -m tiny --versus DBRX", 4, ("torch",)),
]  # fmt: skip
MORE = [
    *((words, 0, HEAVY) for words in ("-h", "")),
    *((words, 0, ("torch",)) for words in (
        "info --json -m TINY", "shapes -m TINY", "shapes --names -m TINY", "shapes --all -m TINY",
        "shapes --params --layer=0 -m TINY", "info --families",
    )),
    *((f"models {words}", 0, ("torch", "httpx", "gguf", "transformers"))
      for words in ("path tiny", "prune --dry-run")),
    *((f"help {words}", 0, ("torch", "transformers", "huggingface_hub"))
      for words in ("", *TOPICS, "generate", "models pull")),
]  # fmt: skip


@pytest.mark.parametrize("commands", few([LIGHT, MORE], 1), ids=["kinds", "more"])
def test_light_commands_import_nothing_heavy_and_make_no_request(tiny, dbrx, commands):
    found = probe(*(words.replace("TINY", tiny).replace("DBRX", dbrx) for words, *_ in commands))
    for (words, code, heavy), (ended, modules) in zip(commands, found, strict=True):
        assert (ended, {*heavy} & {*modules}) == (code, set()), words


METADATA = "importlib.metadata"  # which takes 10 ms
# what `COMMAND --help` may load beside the module of the command: the options that commands share
SHARED = re.compile(
    r"llmcli(\.(errors|limits|processor|xdg|(cli|records|shell)(\..*)?|kernels(\.native)?"
    r"|measure(\.machine)?|ui(\.theme)?|commands))?"
)


def test_the_help_of_a_command_loads_its_options_and_nothing_that_runs():
    """No checkpoints, graph, families, text or views: at most 1.5 × the time of the root's."""
    names = [*ENTRIES, *NESTED]
    for name, (code, modules) in zip(names, probe(*(f"{n} --help" for n in names)), strict=True):
        own = f"llmcli.commands.{name.split()[0]}"
        run = re.compile(rf"{own}(\.(?!measure|view)[a-z.]+)?")
        loaded = {m for m in modules if m.split(".")[0] in ("llmcli", *HEAVY) or m == METADATA}
        beyond = {m for m in loaded if not SHARED.fullmatch(m) and not run.fullmatch(m)}
        assert (name, code, beyond) == (name, 0, set())


@pytest.mark.parametrize("commands", few([
    ["generate hello", "attention hello", "generate hello --random-weights"],
    ["shapes hello", "load", "score hello", "lens hello", "dump hello --name logits",
     "timing hello", "ladder hello", "explain logits[-1,0] hello"],
], 1))  # fmt: skip
def test_an_architecture_that_is_not_supported_is_refused_before_torch(commands, dbrx):
    for code, modules in probe(*(f"{words} -m {dbrx}" for words in commands)):
        assert (code, "torch" in modules) == (4, False)


@pytest.mark.measured
def test_help_takes_less_than_a_fifth_of_a_second():
    """Processor time, the best of several: a busy machine makes the clock on the wall useless."""

    def once():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        children.run(
            [sys.executable, "-m", "llmcli", "--help"], cwd=ROOT, check=True, capture_output=True,
            fresh=True,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(once() for _ in range(7)) < 0.2


def test_version(cli):
    result = cli("--version")
    assert (result.code, result.out) == (0, f"llmcli {__version__}\n")
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == __version__


def test_root_help_lists_every_command(cli):
    text = cli("--help").out
    assert all(f" {name} " in text and f"\n{one.heading} " in text for name, one in ENTRIES.items())
    assert len(text.splitlines()) < 24, "it stays on the first screen"
    assert cli().out == text


@pytest.mark.parametrize("name", [*ENTRIES, *NESTED])
def test_the_help_of_a_command(cli, monkeypatch, name):
    """Grouped, no wider than the terminal; `help NAME` says the same, or explains a topic.

    The root's help does not import the commands: its summary could drift from what they say.
    """
    monkeypatch.setenv("COLUMNS", "72")
    result = cli(*name.split(), "--help")
    assert result.code == 0
    assert result.out.startswith(f"usage: llmcli {name} [OPTIONS]")
    assert "\nOutput:\n" in result.out
    assert "  -h, --help" in result.out
    if topic_of(name.split()):  # models, shapes and attention are explained, and name the options
        assert f"`llmcli {name} --help`" in cli("help", name).out
    else:
        assert cli("help", *name.split()).out == result.out
    assert max(map(len, result.out.splitlines())) <= 72
    if name not in ENTRIES:
        return
    if name not in ("models", "selftest"):  # which are about all of them, or none
        assert "\nModel:\n" in result.out
        assert "\n  -m, --model MODEL" in result.out
    first = importlib.import_module(ENTRIES[name].module).command.__doc__.splitlines()[0]
    shared = set(first.lower().split()) & set(ENTRIES[name].summary.lower().split())
    assert len(shared) >= 2


def test_a_command_s_help_ends_with_its_epilog(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")

    def command() -> None:
        """What it does."""

    plain = build("try", command)
    with plain.make_context("try", []) as context:
        assert plain.get_help(context).endswith("Show this message and exit.")
    told = build("try", command, "\nExamples:\n\n  llmcli try  this\n")
    with told.make_context("try", []) as context:
        assert told.get_help(context).endswith("and exit.\n\nExamples:\n\n  llmcli try  this")


def test_a_long_help_goes_through_the_pager_on_a_terminal(cli, monkeypatch):
    plain = cli("generate", "--help").out
    paged = []
    monkeypatch.setattr("llmcli.shell.output.page", lambda text: not paged.append(text))
    assert cli("generate", "--help").out == plain
    assert not paged, "a pipe has no pager"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli("generate", "--help").out == ""
    assert paged == [plain]
    monkeypatch.setenv("LINES", "400")
    monkeypatch.setenv("COLUMNS", "80")
    assert cli("generate", "-h").out == plain
    assert len(paged) == 1
    monkeypatch.undo()
    monkeypatch.setenv("LLMCLI_PAGER", "")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli("generate", "--help").out.startswith("usage: llmcli generate ")


# `llmcli help`: topics on a terminal and in a pipe, the help of commands, and what it costs


def test_alone_it_lists_commands_and_topics(cli):
    result = cli("help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(cli("--help").out.rstrip())
    assert cli("help", "help").out == cli("help", "--help").out
    for name, topic in TOPICS.items():
        assert f"  {name} " in result.out
        assert topic.summary.split()[0] in result.out


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


def test_no_spelling_means_two_topics_and_none_hides_a_command(cli):
    named = [word for one in TOPICS.values() for word in (one.name, *one.spellings.split())]
    told = {name: cli("help", name).out for name in TOPICS}
    for said in (*named, "Reading Attention", "shapes_and_names", "GGUF"):
        assert cli("help", *said.split()).out == told[topic_of(said.split()).name], said
    assert len(named) == len(set(named))
    assert {*ENTRIES} & {*named} == {"models", "shapes", "attention"}


def test_the_package_has_the_topics():
    """A file for each, and a pattern for them among the data of the package."""
    folder = ROOT / "llmcli" / "assets" / "topics"
    assert {file.stem for file in folder.glob("*")} == set(TOPICS)
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]["llmcli"]
    assert "assets/**/*" in data
