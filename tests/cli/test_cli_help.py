"""Help, topics, version and options: what they say, what is imported for them, how long they take.

What each command's options take and refuse is in the transcripts and in test_cli_config.
"""

from __future__ import annotations

import importlib
import io
import re
import resource
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import children
import pytest
from cli_tiny import write_tiny
from covers import few
from programs import ROOT
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from llmcli import __version__
from llmcli.cli import group, tree
from llmcli.cli.group import build
from llmcli.cli.help import TOPICS, drawn, topic_of
from llmcli.cli.tree import COMPUTING, ENTRIES, NESTED, root
from llmcli.cli.vocabulary import filled
from llmcli.errors import UsageError
from llmcli.records.ranges import Range
from llmcli.shell.params import arg, flatten, opt

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
HEAVY = "torch numpy safetensors huggingface_hub tokenizers jinja2 gguf rich pydantic transformers"
# before there is a process for each: what all of them import, and a name that another program says
PROBE = f"""
import platform, llmcli.shell.options
from llmcli.cli.app import main
platform.processor()
{children.EACH}
import socket
def refused(*a, **k): raise SystemExit("the network")
socket.socket.connect = refused
import llmcli.cli.tree
llmcli.cli.tree.read_ahead = int  # takes half a second, on a thread
code = main(words.split())
print("LOADED", code, *sys.modules, file=sys.stderr, flush=True)
os._exit(0)
"""


def probe(*commands, early="sys"):
    """The exit code of each, and the modules that were imported; `early`: by all of them."""
    done = children.run(
        [sys.executable, "-c", f"import {early}\n{PROBE}", *commands], capture_output=True,
        text=True, cwd=ROOT, stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("LOADED ")]
    return [(int(code), modules) for _, code, *modules in lines]


@pytest.fixture
def dbrx(tmp_path):
    """A model of an architecture that is not supported."""
    return str(write_tiny(tmp_path / "m", model_type="dbrx"))


# what commands may import that have to do without torch, but not without these
FREE = "numpy, pydantic, rich.console, llmcli.families.family, llmcli.graph.graph"
# what each command does not import, and its exit code if it is not 0: of each kind the first ones,
# such as an architecture that is not supported, and others
LIGHT, MORE = (
    re.findall(r"(?m)^(.*): ?(.*?)(?: → (\d))?$", part)
    for part in Path(__file__).with_name("light-commands.txt").read_text("utf-8").split("\n\n")
)
MORE += [("torch transformers huggingface_hub", f"help {topic}", "") for topic in TOPICS]


@pytest.mark.parametrize("commands", few([LIGHT, MORE], 1), ids=["kinds", "more"])
def test_light_commands_import_nothing_heavy_and_make_no_request(tiny, dbrx, commands):
    for early, kind in ("sys", False), (FREE, True):
        asked = [one for one in commands if kind == (not re.search("HEAVY|numpy|pydantic", one[0]))]
        lines = (words.replace("TINY", tiny).replace("DBRX", dbrx) for _, words, _ in asked)
        for (heavy, words, code), (ended, modules) in zip(
            asked, probe(*lines, early=early), strict=True
        ):
            found = {*heavy.replace("HEAVY", HEAVY).split()} & {*modules}
            assert (ended, found) == (int(code or 0), set()), words


METADATA = "importlib.metadata"  # which takes 10 ms
# what `COMMAND --help` may load beside the module of the command: the options that commands share
SHARED = re.compile(
    r"llmcli(\.(errors|limits|processor|xdg|(cli|records|shell)(\..*)?|kernels(\.native)?"
    r"|measure(\.machine)?|ui(\.theme)?|commands))?"
)


def test_the_help_of_a_command_loads_its_options_and_nothing_that_runs():
    """No checkpoints, graph, families, text or views: at most 1.5 × the time of the root's."""
    names, kinds = [*ENTRIES, *NESTED], {"llmcli", *HEAVY.split()}
    for name, (code, modules) in zip(names, probe(*(f"{n} --help" for n in names)), strict=True):
        own = f"llmcli.commands.{name.split()[0]}"
        run = re.compile(rf"{own}(\.(?!measure|view)[a-z.]+)?")
        loaded = {m for m in modules if m.split(".")[0] in kinds or m == METADATA}
        beyond = {m for m in loaded if not SHARED.fullmatch(m) and not run.fullmatch(m)}
        assert (name, code, beyond) == (name, 0, set())


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
    assert PROJECT["project"]["version"] == __version__


def test_root_help_stays_on_the_first_screen(cli):
    """What it says, and that nothing and `help` say it, too, is in the transcript `root`."""
    assert len(cli("--help").out.splitlines()) < 24


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


# options that no command has yet: several needs, short names in rules, names with `_`


@dataclass(frozen=True, kw_only=True)
class Named:
    most_words: int = opt(
        5, "-w --most-words N", "Words.", within=Range(1, or_else=-1), aliases=("--words",)
    )


@dataclass(frozen=True, kw_only=True)
class Ruled:
    width: str | None = arg(None, "WIDTH", "Width.")
    high: bool = opt(False, "-H --high", "High.", needs=("--low", "-w"), excludes=("--flat",))
    low: bool = opt(False, "--low", "Low.")
    flat: bool = opt(False, "--flat", "Flat.", excludes=("WIDTH", "--words=7", "--deep!=0"))
    deep: int = opt(1, "--deep N", "Deep.")
    words: int = opt(5, "-w --words N", "Words.")


@pytest.mark.parametrize(("argv", "message"), [
    (["--high"], "`--high` needs `--low` or `-w`"),
    (["--high", "-w", "5"], "`--high` needs `--low` or `-w`"),  # the default
    (["--high", "-w", "6"], ""),
    (["-H", "--low", "--flat"], "`--high` and `--flat` exclude each other"),
    (["wide", "--flat"], "`--flat` and `WIDTH` exclude each other"),
    (["wide", "--high", "--low"], ""),
    (["--flat", "-w", "7"], "`--flat` and `--words 7` exclude each other"),
    (["--flat", "--deep", "2"], "`--flat` and `--deep 2` exclude each other"),
    (["--flat", "-w", "6", "--deep", "0"], ""),
])  # fmt: skip
def test_what_an_option_needs_and_excludes(argv, message):
    def function(ruled: Ruled) -> None:
        """A command."""

    command = build("try", function)
    with command.make_context("try", argv) as context:
        if not message:
            return command.invoke(context)
        with pytest.raises(UsageError) as refused:
            command.invoke(context)
    assert refused.value.message == message


@pytest.mark.parametrize("name", ["-w", "--most-words", "--most_words", "--words"])
def test_an_option_has_names_that_no_help_lists(name):
    seen = {}

    def function(named: Named) -> None:
        """A command."""
        seen.update(named=named)

    command = build("try", function)
    with command.make_context("try", [name, "-1"]) as context:
        text = command.get_help(context)
        assert "-w, --most-words N  Words." in text
        assert "--words" not in text.replace("--most-words", "")
        assert "_" not in text
        command.invoke(context)
    assert seen["named"] == Named(most_words=-1)


def test_one_name_twice_is_a_mistake_in_the_program():
    def function(one: Named, again: Named) -> None:
        """Never called."""

    with pytest.raises(ValueError, match="two options are called 'most_words'"):
        flatten(function)


# `llmcli help`: topics on a terminal and in a pipe, the help of commands, and what it costs


@pytest.mark.parametrize("name", list(TOPICS))
def test_a_topic_is_plain_text_in_a_pipe(cli, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    result = cli("help", name)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("# ")
    assert not re.search("\x1b|<!--|```|\n\n\n", result.out)
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
    named = [(word, one) for one in TOPICS.values() for word in (one.name, *one.spellings.split())]
    assert all(topic_of([word]) is one for word, one in named)
    for said, name in {"Reading Attention": "attention", "shapes_and_names": "shapes"}.items():
        assert cli("help", *said.split()).out == cli("help", name).out
    named = [word for word, _ in named]
    assert len(named) == len(set(named))
    assert {*ENTRIES} & {*named} == {"models", "shapes", "attention"}


def test_the_package_has_the_topics():
    """A file for each, and a pattern for them among the data of the package."""
    folder = ROOT / "llmcli" / "assets" / "topics"
    assert {file.stem for file in folder.glob("*")} == set(TOPICS)
    assert "assets/**/*" in PROJECT["tool"]["setuptools"]["package-data"]["llmcli"]


# PyTorch's libraries are opened on a thread, and nothing waits for that


linux = pytest.mark.skipif(sys.platform != "linux", reason="only there")

# what was loaded when `read_ahead` returned, and which libraries of Python's own came after that
WATCH = """
import os, sys
from llmcli.cli import tree
from llmcli.cli.app import main

def so():
    files = {name: str(getattr(m, "__file__", None)) for name, m in list(sys.modules.items())}
    return {n for n, file in files.items() if file.endswith(".so") and "-packages" not in file}

class Torch:
    def find_spec(self, name, path, target=None):
        if name == "torch" and started:
            print("LATE", sorted(so() - started.pop()), file=sys.stderr)

started = []
sys.meta_path.insert(0, Torch())
own = tree.read_ahead
def watched():
    own()
    started.append(so())
tree.read_ahead = watched
os._exit(main(sys.argv[1:]))
"""


@linux
def test_no_library_of_python_waits_for_those_of_torch():
    words = ["generate", "Hello", "-n", "1", "-m", "tiny"]
    ran = children.run([sys.executable, "-c", WATCH, *words], capture_output=True, text=True)
    assert "LATE []" in ran.stderr, ran.stderr


@linux
def test_the_libraries_are_those_that_torch_opens():
    code = """
import os, sys, time
from pathlib import Path
from llmcli.cli.group import read_ahead
read_ahead()
for _ in range(600):
    opened = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()
              if "libtorch_cpu" in line}
    if opened:
        break
    time.sleep(0.05)
assert opened and "torch" not in sys.modules
import torch
assert torch.ones(3).sum() == 3
maps = Path("/proc/self/maps").read_text()
assert {line.split()[-1] for line in maps.splitlines() if "libtorch_cpu" in line} == opened
sys.stdout.flush()
os._exit(0)
"""
    ran = children.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("words", "read"), [
    ("generate x", True), ("bench", True), ("generate --help", False), ("generate -h", False),
    ("info", False), ("bench compare a b", False),
])  # fmt: skip
def test_only_commands_that_compute_read_them(words, read, monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(tree, "read_ahead", lambda: calls.append(1))
    command = root()
    with command.make_context("llmcli", words.split()) as context:
        command.resolve_command(context, words.split())
    assert bool(calls) is read


def test_without_torch_nothing_is_opened(monkeypatch):
    monkeypatch.setattr(group, "find_spec", lambda name: None)
    monkeypatch.setattr(group, "Thread", None)  # would be called
    group.read_ahead()


def test_every_command_that_computes_is_named():
    """Those whose modules import torch somewhere below `commands/NAME`, or load a model."""
    folder = ROOT / "llmcli" / "commands"
    signs = ("load_model(", "Inspection(", "import torch")
    names = {
        name for name in ENTRIES
        if any(sign in file.read_text() for file in (folder / name).glob("*.py") for sign in signs)
    }  # fmt: skip
    # the selftest imports what imports torch
    assert names | {"selftest"} == COMPUTING
