"""Help and version: what they say, what they import, how long they take."""

from __future__ import annotations

import importlib
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import children
import pytest
from cli_tiny import write_tiny
from covers import few

from llmcli import __version__
from llmcli.cli.group import build
from llmcli.cli.tree import ENTRIES

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "safetensors", "huggingface_hub", "tokenizers", "jinja2", "gguf",
         "rich", "pydantic", "transformers")  # fmt: skip
PROBE = """
import sys
from llmcli.cli.app import main
code = main(sys.argv[1:])
loaded = [name for name in {heavy!r} if name in sys.modules]
print("LOADED", code, *loaded, file=sys.stderr)
"""


def probe(*argv, heavy=HEAVY):
    done = children.run(
        [sys.executable, "-c", PROBE.format(heavy=heavy), *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return done.stderr.rsplit("LOADED", 1)[1].split()


@pytest.mark.parametrize(
    "argv", [["--help"], ["-h"], ["--version"], [], ["generate", "--help"], ["nonsense"]]
)
def test_help_version_and_typing_errors_import_nothing_heavy(argv):
    code, *loaded = probe(*argv)
    assert loaded == []
    assert code == ("2" if argv == ["nonsense"] else "0")


@pytest.mark.parametrize("argv", [["env"], ["--show-completion"], ["generate", "--top-k", "x"]])
def test_light_commands_import_no_torch(argv, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert probe(*argv, heavy=("torch", "pydantic"))[1:] == []


@pytest.mark.parametrize(
    "argv",
    few([["generate", "hello"], ["shapes", "hello"], ["load"],
         ["score", "hello"], ["attention", "hello"], ["lens", "hello"],
         ["dump", "hello", "--name", "logits"], ["timing", "hello"], ["ladder", "hello"],
         ["explain", "logits[-1,0]", "hello"], ["generate", "hello", "--random-weights"]], 3),
)  # fmt: skip
def test_an_architecture_that_is_not_supported_is_refused_before_torch(argv, tmp_path):
    folder = write_tiny(tmp_path / "m", model_type="dbrx")
    code, *loaded = probe(*argv, "-m", str(folder), heavy=("torch",))
    assert (code, loaded) == ("4", [])


def test_a_second_model_that_is_not_supported_is_refused_before_the_first_is_loaded(tmp_path):
    folder = write_tiny(tmp_path / "m", model_type="dbrx")
    argv = ("score", "hello", "-m", "tiny", "--versus", str(folder))
    assert probe(*argv, heavy=("torch",)) == ["4"]


@pytest.mark.parametrize(
    "argv",
    [["info"], ["info", "--json"], ["shapes"], ["shapes", "--json"], ["shapes", "--names"],
     ["shapes", "--all"], ["shapes", "--params", "--layer=0"]],
)  # fmt: skip
def test_what_is_known_without_weights_imports_no_torch(argv, tiny):
    assert probe(*argv, "-m", tiny, heavy=("torch",)) == ["0"]


def test_tokens_and_families_import_no_torch(tiny):
    assert probe("tokens", "hello", "-m", tiny, heavy=("torch", "numpy")) == ["0"]
    assert probe("info", "--families", heavy=("torch",)) == ["0"]


def test_help_takes_less_than_a_fifth_of_a_second():
    """Processor time, the best of several: a busy machine makes the clock on the wall useless."""

    def once():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        children.run(
            [sys.executable, "-m", "llmcli", "--help"], cwd=ROOT, check=True, capture_output=True
        )
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
    for name, entry in ENTRIES.items():
        assert f" {name} " in text
        assert f"\n{entry.heading} " in text
    assert len(text.splitlines()) < 24, "it stays on the first screen"
    assert max(map(len, text.splitlines())) <= 80
    assert cli().out == text


@pytest.mark.parametrize("name", list(ENTRIES))
def test_command_help_is_grouped_and_fits_the_terminal(cli, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "72")
    result = cli(name, "--help")
    assert result.code == 0
    assert result.out.startswith(f"usage: llmcli {name} [OPTIONS]")
    if name not in ("models", "selftest"):  # which are about all of them, or none
        assert "\nModel:\n" in result.out
        assert "\n  -m, --model MODEL" in result.out
    assert "\nOutput:\n" in result.out
    assert "  -h, --help" in result.out
    assert max(map(len, result.out.splitlines())) <= 72


@pytest.mark.parametrize("name", list(ENTRIES))
def test_the_summary_says_what_the_command_says(name):
    """The root's help does not import the commands, so it could drift from them."""
    first = importlib.import_module(ENTRIES[name].module).command.__doc__.splitlines()[0]
    shared = set(first.lower().split()) & set(ENTRIES[name].summary.lower().split())
    assert len(shared) >= 2


def test_help_names_every_choice_and_default(cli):
    text = " ".join(cli("generate", "--help").out.split())
    assert "auto, float64, float32, bfloat16 or float16" in text
    assert "[default: the model's, else 256]" in text
    assert "auto (the file's), none, int8 or int4" in text
    assert "with --batch one per prompt, one a line" in text
    assert "With --json one document per prompt, one a line" in text
    assert "[default: the model's, else 0.95]" in text


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
    monkeypatch.setattr("llmcli.cli.output.page", lambda text: not paged.append(text))
    assert cli("generate", "--help").out == plain
    assert not paged, "a pipe has no pager"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli("generate", "--help").out == ""
    assert paged == [plain]
    monkeypatch.setenv("LINES", "400")
    monkeypatch.setenv("COLUMNS", "80")
    assert cli("generate", "-h").out == plain
    assert len(paged) == 1


def test_without_a_pager_a_long_help_is_printed(cli, monkeypatch):
    monkeypatch.setenv("LLMCLI_PAGER", "")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli("generate", "--help").out.startswith("usage: llmcli generate ")
