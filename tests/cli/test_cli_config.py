"""The configuration file: what it sets, what wins over it, what is wrong with it; what `env` says.
"""

import errno
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import children
import pytest
from json_schemas import errors
from programs import ended, start

from llmcli import OPENMP_THREADS, OPENMP_VARIABLES
from llmcli.cli.group import usage_error
from llmcli.cli.tree import ENTRIES, NESTED, root
from llmcli.errors import UsageError
from llmcli.kernels import native
from llmcli.measure.machine import environment
from llmcli.records.machine import CUDA_OPTIONS
from llmcli.shell.configuration import COMMAND_LINE_ONLY, VARIABLES, settable, yields_to

COMMANDS = {name: root().get_command(None, name) for name in (*ENTRIES, *NESTED)}


def key_of(option):
    return max(option.opts, key=len).lstrip("-")


def options(command):
    """The options of a command by their keys in the file; a hidden one has none."""
    found = (p for p in COMMANDS[command].params if p.param_type_name == "option" and not p.hidden)
    return {key_of(option): option for option in found}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No variable of the developer's, and a home that is empty."""
    for name in (
        *sum(VARIABLES.values(), ()), *OPENMP_THREADS, *OPENMP_VARIABLES, "HF_HOME",
        "HF_HUB_CACHE", "HF_TOKEN", "LLMCLI_CACHE", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES",
        "LLMCLI_KERNELS", "LLMCLI_TRITON",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Writes the file, and makes it the one that is read."""

    def write(text, path=None):
        path = path or tmp_path / "settings.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        monkeypatch.setenv("LLMCLI_CONFIG", str(path))
        return path

    return write


def parsed(command, *argv):
    """What a command would be called with, and where each value is from."""
    words = ["x"] * len([p for p in COMMANDS[command].params if p.required])
    top = root().make_context("llmcli", [command], resilient_parsing=True)
    context = COMMANDS[command].make_context(command, [*argv, *words], parent=top)
    sources = {name: context.get_parameter_source(name).name for name in context.params}
    return context.params, sources


def example(option):
    """A value that the option takes: as the file has it, and on the command line."""
    name = max(option.opts, key=len)
    if option.is_flag:
        return True, [name]
    if option.conversion.choices:
        value = option.conversion.choices[-1]
    elif option.conversion.kind is str:
        value = "3"
    else:
        allowed = option.conversion.range
        value = option.conversion.kind(1 if allowed is None else allowed.high or allowed.low + 1)
    return ([value] if option.multiple else value), [name, str(value)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_a_key_or_says_why_not(configured, command):
    table = command.replace(" ", ".")
    for key, option in options(command).items():
        value, words = example(option)
        configured("")
        given = parsed(command, *words)[0][option.name] if settable(option) else None
        for spelling in {key, key.replace("-", "_")}:
            configured(f"[{table}]\n{spelling} = {json.dumps(value)}\n")
            if settable(option):
                params, sources = parsed(command)
                assert (params[option.name], sources[option.name]) == (given, "DEFAULT_MAP")
            elif command != "env":
                with pytest.raises(UsageError, match=f"`{table}.{spelling}` is not for a file"):
                    parsed(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_refuses_what_it_does_not_take_and_names_itself(command):
    """No value, numbers of any number of digits, and texts that are no number and no choice."""
    for option in options(command).values():
        name, conversion = max(option.opts, key=len), option.conversion
        if option.is_flag:
            continue
        top = root().make_context("llmcli", [command], resilient_parsing=True)
        with pytest.raises(Exception, match="requires an argument") as caught:
            COMMANDS[command].make_context(command, [name], parent=top)
        assert usage_error(caught.value).message == f"`{name}` takes a value"
        digits = ["9" * 19, "9" * 5000] * (conversion.kind is int)
        number = ["", "x", "1_0", "0x1", "nan", "inf"] * (conversion.kind in (int, float))
        for wrong in [*digits, *number, *["", "X@"] * bool(conversion.choices)]:
            with pytest.raises(UsageError, match=f"^`{name}` ") as refused:
                parsed(command, f"{name}={wrong}")
            assert refused.value.hint


def test_every_name_is_one_options_and_some_are_not_for_the_file():
    for command in COMMANDS.values():
        names = [name for p in command.params for name in (*p.opts, *p.secondary_opts)]
        assert len(names) == len(set(names)), "what undoes a switch is no other option"
    assert set(COMMAND_LINE_ONLY) <= {key for command in COMMANDS for key in options(command)}
    for command, key in (("chat", "save"), ("attention", "output"), ("generate", "batch")):
        assert not settable(options(command)[key])
    assert settable(options("bench")["output"])
    assert settable(options("info")["batch"])


def test_what_a_file_sets(configured, as_written):
    """In each line of a file a configuration, `; ` between its lines, a command line, and values.

    Tables of two words, and what is taken back; lists, and one value for one; of greedy and a
    temperature the nearer one, 0 too; what is read of a prompt, which only `-` excludes.
    """
    file, rows = Path(__file__).with_name("settings.txt"), []
    for row in file.read_text("utf-8").splitlines():
        text, line, values = re.fullmatch(r"(.*) → (.*?): (\{.*)", row).groups()
        configured(text.replace("; ", "\n") + "\n")
        command = max((name for name in COMMANDS if line.startswith(name)), key=len)
        found, _ = parsed(command, *line.removeprefix(command).split())
        said = {name: found[name] for name in json.loads(values)}
        rows.append(f"{text} → {line}: {json.dumps(said)}\n")
    as_written(file, "".join(rows))


PAIRS = [
    (command, option.name, *other)
    for command in COMMANDS if command != "env"
    for option in options(command).values() if settable(option)
    for other in yields_to(COMMANDS[command].params)[option.name]
    if other[0] in {one.name for one in options(command).values()}
]  # fmt: skip


@pytest.mark.parametrize(("command", "name", "other", "its", "own"), PAIRS)
def test_what_the_file_sets_gives_way_to_what_excludes_it(
    configured, command, name, other, its, own
):
    """On the command line, and in a command's own table where that is for the file."""
    found = {option.name: option for option in options(command).values()}
    line = f"{key_of(found[name])} = {json.dumps(own or example(found[name])[0])}\n"
    configured(line)
    assert parsed(command)[1][name] == "DEFAULT_MAP"
    theirs, words = example(found[other])
    words = [words[0], its] if its else words
    assert parsed(command, *words)[1][name] == "DEFAULT"
    if its:  # any other value leaves it in force
        assert parsed(command, words[0], "else")[1][name] == "DEFAULT_MAP"
    if settable(found[other]):
        configured(f"{line}[{command}]\n{key_of(found[other])} = {json.dumps(theirs)}\n")
        sources = parsed(command)[1]
        assert (sources[name], sources[other]) == ("DEFAULT", "DEFAULT_MAP")


def settings(cli, *argv):
    document = cli("env", "--json", *argv).json()
    assert errors(document, "env") == []
    found = {item["name"]: (item["value"], item["source"]) for item in document["settings"]}
    return found, document


def test_where_the_file_is(cli, monkeypatch, tmp_path):
    monkeypatch.delenv("LLMCLI_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # to be ignored, as the specification says
    home = tmp_path / ".config" / "llmcli" / "config.toml"
    _, document = settings(cli)
    assert document["configuration"] == {
        "path": str(home), "exists": False, "options": [], "problems": [],
    }  # fmt: skip
    text = cli("env").out
    assert "~/.config/llmcli/config.toml (no such file)" in text
    assert "configuration file" not in text
    home.parent.mkdir(parents=True)
    home.write_bytes(b"\xef\xbb\xbfseed = 3\n")  # as some editors begin a file
    assert settings(cli)[0]["seed"] == ("3", "file")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "else"))
    assert settings(cli)[0]["seed"] == (None, "default")
    monkeypatch.setenv("LLMCLI_CONFIG", "~/.config/llmcli/config.toml")
    assert settings(cli)[0]["seed"] == ("3", "file")
    for none in ("", os.devnull):
        monkeypatch.setenv("LLMCLI_CONFIG", none)
        assert settings(cli)[0]["seed"] == (None, "default")
    assert (tmp_path / ".config").is_dir()
    monkeypatch.delenv("LLMCLI_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))  # a file where a folder should be
    assert cli("tokens", "a", "-m", "tiny").code == 0


WRONG = {  # what a transcript would be long, or old, with
    "deep": ("a = " + "[" * 20_000, "it is nested too deeply"),
    "digits": ("seed = " + "9" * 5000, "it is not TOML: exceeds the limit"),
    "large": ("#" * (1 << 20) + "\n", "it is larger than 1 MiB"),
    "long": (f'dtype = "{"x" * 9999}"', "has no choice `xxx"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_wrong_is_one_error(configured, cli, text, message):
    path = configured(text)
    refused = cli("tokens", "hello", "-m", "tiny")
    assert (refused.code, refused.out) == (2, "")
    line, hint = refused.err.splitlines()
    assert line.startswith(f"error: configuration file `{path}`: ")
    assert message in line
    assert hint.startswith("hint: ")
    assert len(line) < 500
    assert cli("tokens", "hello", "-m", "tiny", "--json").json()["error"]["kind"] == "usage"


def deny(monkeypatch, method, place):
    """A method of Path for what is there is refused, as to anybody but root."""
    real = getattr(Path, method)

    def refuse(path, *argv, **options):
        if path.is_relative_to(place):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *argv, **options)

    monkeypatch.setattr(Path, method, refuse)


def test_a_file_that_cannot_be_read_is_an_error(cli, monkeypatch, tmp_path):
    folder, fifo, locked = tmp_path / "folder", tmp_path / "fifo", tmp_path / "locked.toml"
    folder.mkdir()
    os.mkfifo(fifo)
    locked.write_text("quiet = true\n")
    deny(monkeypatch, "open", locked)
    for path, message in (
        (folder, "it is a directory"), (fifo, "it is not a regular file"),
        ("/dev/zero", "it is not a regular file"), (locked, "permission denied"),
        (tmp_path / "none.toml", "no such file or directory"),
    ):  # fmt: skip
        monkeypatch.setenv("LLMCLI_CONFIG", str(path))
        refused = cli("tokens", "hello", "-m", "tiny")
        assert refused.code == 2
        assert refused.err.splitlines()[0] == f"error: configuration file `{path}`: {message}"
        assert cli("env").code == 0


def test_help_does_not_read_the_file_and_a_command_reads_it_once(configured, cli, monkeypatch):
    path, read, opened = configured("quiet = true\n"), [], Path.open

    def noted(one, *argv, **options):
        read.extend([one] if one == path else [])
        return opened(one, *argv, **options)

    monkeypatch.setattr(Path, "open", noted)
    for argv in (["--help"], ["--version"], ["generate", "--help"], ["score", "x", "-h"]):
        cli(*argv)
    assert read == []
    assert cli("tokens", "hello", "-m", "tiny").code == 0
    assert read == [path]


def test_no_child_of_a_test_reads_the_developers_file(configured, monkeypatch, tmp_path):
    configured("x = \n", tmp_path / ".config" / "llmcli" / "config.toml")
    ended(start("models"), 2)
    monkeypatch.delenv("LLMCLI_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    ended(start("models"))


@pytest.mark.parametrize("why", ["permission denied", "file name too long"])
def test_env_shows_a_folder_that_may_not_be_read(cli, monkeypatch, tmp_path, why):
    """The machine is shown all the same, and what is wrong with the file."""
    folder = tmp_path / ("a" * 300 if why == "file name too long" else "closed")
    monkeypatch.delenv("LLMCLI_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    if why == "permission denied":
        deny(monkeypatch, "stat", folder)
    result = cli("env")
    assert result.code == 0
    assert f"config.toml`: {why}" in " ".join(result.out.split())
    assert "no such file" not in result.out


def test_paths_are_absolute_in_json_and_short_in_text(cli, monkeypatch, tmp_path):
    found, cache = settings(cli)[0], f"{tmp_path}/.cache"
    assert found["llmcli cache"] == (f"{cache}/llmcli", "default")
    assert found["hub home"] == (f"{cache}/huggingface", "default")
    assert found["hub cache"] == (f"{cache}/huggingface/hub", "default")
    assert found["offline"] == (False, "default")
    text = cli("env").out
    for words in ("~/.cache/llmcli ", "~/.cache/huggingface/hub ", "PyTorch's choice for"):
        assert words in text
    monkeypatch.setenv("HF_HUB_CACHE", "here")
    assert settings(cli)[0]["hub cache"] == (str(Path("here").absolute()), "environment")
    monkeypatch.setenv("LLMCLI_CACHE", "/else/where")
    assert "  /else/where  " in cli("env").out


def test_the_hubs_places_are_those_of_its_library(cli, monkeypatch):
    variables = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE")
    ask = f"""{children.EACH}
os.environ[words] = "/else/where"
from huggingface_hub import constants as c; print(c.HF_HUB_CACHE, c.HF_HOME)
"""
    told = children.run(
        [sys.executable, "-c", ask, *variables], capture_output=True, text=True, check=True
    )
    *places, codes = told.stdout.splitlines()
    assert codes == "exit codes: 0 0 0"
    for variable, place in zip(variables, places, strict=True):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "/else/where")
            found, _ = settings(cli)
        assert [found["hub cache"][0], found["hub home"][0]] == place.split()


@pytest.fixture
def kernels(monkeypatch):
    """Sets $LLMCLI_KERNELS, as if the process had been started with it."""

    def set_to(level):
        monkeypatch.setenv("LLMCLI_KERNELS", level)
        native.level.cache_clear()

    yield set_to
    monkeypatch.undo()
    native.level.cache_clear()


def test_the_kernels_are_named(cli, kernels, monkeypatch):
    native.level.cache_clear()
    found, document = settings(cli)
    assert found["kernels"] == (None, "default")
    assert document["environment"]["kernel_level"] == native.status()
    assert f"kernels    {native.status()}\n" in cli("env").out
    kernels("off")
    found, document = settings(cli)
    assert found["kernels"][0] == document["environment"]["kernel_level"] == "off"
    monkeypatch.setattr(native, "_groups", native._groups.__wrapped__)
    monkeypatch.setattr("llmcli.measure.machine._nvidia_files", lambda: ("NVIDIA H100",))
    assert "kernels    off · Triton off\n" in cli("env").out


@pytest.mark.parametrize("gpus", [(), ("NVIDIA H200",)])
def test_options_of_cuda_are_shown_if_there_is_a_gpu(cli, gpus, monkeypatch):
    machine = replace(environment(), gpus=gpus)
    monkeypatch.setattr("llmcli.commands.env.command.environment", lambda: machine)
    found, _ = settings(cli)
    assert all(found.get(name) == ((False, "default") if gpus else None) for name in CUDA_OPTIONS)
    assert ("Triton kernels" in found) == bool(gpus)
    line = "cuDNN attention off · CUDA TF32 off · CUDA 16-bit reductions off"
    assert (line in " ".join(cli("env").out.split())) == bool(gpus)


@pytest.mark.parametrize("argv", [("env",), ("tokens", "-m", "tiny", "a"), ("info", "-m", "tiny")])
def test_a_level_that_does_not_exist_is_refused_before_anything_is_done(cli, kernels, argv):
    kernels("avx3")
    refused = cli(*argv)
    assert refused.code == 2
    assert refused.out == ""
    assert "`LLMCLI_KERNELS=avx3` is not a level" in refused.err
    levels = f"{', '.join(native.LEVELS[:-1])} or {native.LEVELS[-1]}"
    assert f"hint: set it to off, {levels}, or unset it" in refused.err
