"""The configuration file: what it sets, what wins over it, and what is wrong with it."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path

import children
import pytest
from cli_tiny import write_tiny
from json_schemas import errors

from llmcli.cli.configuration import file as file_module
from llmcli.cli.configuration.values import COMMAND_LINE_ONLY, VARIABLES, YIELDS, settable
from llmcli.cli.tree import ENTRIES, NESTED, root
from llmcli.errors import UsageError

COMMANDS = {name: root().get_command(None, name) for name in (*ENTRIES, *NESTED)}
SAMPLED = ("generate", "hello", "--raw", "-n", "2", "--json")


def options(command):
    """The options of a command by their keys in the file."""
    found = (p for p in COMMANDS[command].params if p.param_type_name == "option")
    return {max(p.opts, key=len).lstrip("-"): p for p in found}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in sum(VARIABLES.values(), ()):
        monkeypatch.delenv(name, raising=False)


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


@pytest.fixture
def sampled(cli, tiny):
    """The sampling of a text on the small model."""

    def run(*argv):
        result = cli(*SAMPLED, "-m", tiny, "--random-weights", *argv)
        assert result.code == 0, result.err
        return result.json()["sampling"]

    return run


def parsed(command, *argv):
    """What a command would be called with, and where each value is from."""
    words = ["x"] * len([p for p in COMMANDS[command].params if p.required])
    context = COMMANDS[command].make_context(command, [*argv, *words])
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
        for spelling in {key, key.replace("-", "_")}:
            configured(f"[{table}]\n{spelling} = {json.dumps(value)}\n")
            if settable(option):
                params, sources = parsed(command)
                assert params[option.name] == parsed(command, *words)[0][option.name]
                assert sources[option.name] == "DEFAULT_MAP"
            elif command != "env":
                with pytest.raises(UsageError, match=f"`{table}.{spelling}` is not for a file"):
                    parsed(command)


def test_what_undoes_a_switch_is_no_other_option():
    for command in COMMANDS.values():
        names = [name for p in command.params for name in (*p.opts, *p.secondary_opts)]
        assert len(names) == len(set(names))


def test_what_is_not_for_the_file_are_options():
    assert set(COMMAND_LINE_ONLY) <= {key for command in COMMANDS for key in options(command)}
    for command, key in (("chat", "save"), ("attention", "output"), ("generate", "batch")):
        assert not settable(options(command)[key])
    assert settable(options("bench")["output"])
    assert settable(options("info")["batch"])


def test_a_table_wins_over_the_top_and_belongs_to_one_command(configured, sampled, cli, tiny):
    configured(
        "temperature = 0.25\ntop_k = 7\nmax-tokens = 3\nbudget = 2.5\n"
        "[generate]\ntop-k = 9\n[chat]\ntemperature = 0.75\n"
    )
    found = sampled()
    assert (found["temperature"], found["top_k"], found["max_tokens"]) == (0.25, 9, 2)
    origins = found["origins"]
    assert origins["temperature"] == origins["top_k"] == "configuration file"
    assert origins["min_p"] == "default"
    assert parsed("chat")[0]["temperature"] == 0.75
    assert parsed("ladder")[0]["budget"] == 2.5
    assert cli("tokens", "hello", "-m", tiny).code == 0  # which has none of these options
    full = cli("generate", "hello", "--raw", "-m", tiny, "--random-weights", "--stats", "full")
    assert "0.25  (configuration file)" in full.err


def test_tables_of_two_words(configured):
    configured("quiet = true\n[models.pull]\noffline = true\n[bench.compare]\nquiet = false\n")
    assert parsed("models pull")[0]["offline"] is True
    assert parsed("models")[0]["quiet"] is True
    assert parsed("bench compare")[0]["quiet"] is False
    assert parsed("bench")[0]["offline"] is False


def test_repeatable_options_take_lists(configured):
    bench = '[bench]\nn-prompt = [64, "1-4"]\nn-gen = 5\n'
    configured(f'stop = ["a", "b"]\n[chat]\nstop = "c"\n{bench}')
    assert parsed("generate")[0]["stop"] == ["a", "b"]
    assert parsed("chat")[0]["stop"] == ["c"]
    assert parsed("generate", "--stop", "z")[0]["stop"] == ["z"]
    assert (parsed("bench")[0]["n_prompt"], parsed("bench")[0]["n_gen"]) == (["64", "1-4"], ["5"])


def test_flags_win_over_the_file_and_the_file_over_the_model(configured, cli, tmp_path):
    folder = write_tiny(tmp_path / "m")
    own = {"temperature": 0.6, "top_k": 7, "min_p": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(own))
    configured(f'model = "{folder}"\ntemperature = 0.25\ntop-p = 0.5\nmin-p = 0\nseed = 5\n')
    result = cli(*SAMPLED, "--random-weights", "-p", "0.75").json()
    sampling, origins = result["sampling"], result["sampling"]["origins"]
    assert result["model"]["name"] == str(folder)
    assert sampling["seed"] == 5
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty")
    assert [(sampling[name], origins[name]) for name in names] == [
        (0.25, "configuration file"), (7, "generation_config.json"), (0.75, "flag"),
        (0, "configuration file"), (0, "default"),
    ]  # fmt: skip


def test_a_flag_of_the_file_is_taken_back_on_the_command_line(configured, sampled):
    configured("greedy = true\nquiet = true\n[score]\nno-special = true\n")
    assert sampled()["greedy"] is True
    assert sampled()["origins"]["temperature"] == "configuration file"
    taken_back = sampled("--no-greedy")
    assert (taken_back["greedy"], taken_back["origins"]["temperature"]) == (False, "default")
    assert parsed("score", "--special", "--no-quiet")[0]["no_special"] is False


PAIRS = [(name, other) for name, others in YIELDS.items() for other in others]


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_what_the_file_sets_gives_way_to_what_excludes_it(configured, name, other):
    """On the command line, and in a command's own table where that is for the file."""
    for command in COMMANDS:
        found = {option.name: option for option in options(command).values()}
        if name not in found or other not in found or not settable(found[name]):
            continue
        value, _ = example(found[name])
        line = f"{max(found[name].opts, key=len).lstrip('-')} = {json.dumps(value)}\n"
        configured(line)
        assert parsed(command)[1][name] == "DEFAULT_MAP"
        theirs, words = example(found[other])
        assert parsed(command, *words)[1][name] == "DEFAULT"
        if settable(found[other]):
            key = max(found[other].opts, key=len).lstrip("-")
            configured(f"{line}[{command}]\n{key} = {json.dumps(theirs)}\n")
            assert (parsed(command)[1][name], parsed(command)[1][other]) == (
                "DEFAULT", "DEFAULT_MAP",
            )  # fmt: skip
        break
    else:
        raise AssertionError(f"no command has both {name} and {other}")


@pytest.mark.parametrize(
    ("file", "argv", "greedy"),
    [("greedy = true", ("-t", "0.5"), False), ("temperature = 0.5", ("--greedy",), True),
     ("temperature = 0.5\n[generate]\ngreedy = true", (), True),
     ("greedy = true\n[generate]\ntemperature = 0.5", (), False),
     ("temperature = 0.5\n[generate]\ngreedy = false", (), False)],
)  # fmt: skip
def test_the_nearer_of_greedy_and_a_temperature_wins(configured, sampled, file, argv, greedy):
    configured(file)
    assert sampled(*argv)["greedy"] is greedy


def test_a_temperature_of_0_wins_too(configured):
    configured("greedy = true\n[generate]\ntemperature = 0")
    params = COMMANDS["generate"].make_context("generate", ["hello"]).params
    assert (params["temperature"], params["greedy"]) == (0, False)


def settings(cli, *argv):
    document = cli("env", "--json", *argv).json()
    assert errors(document, "env") == []
    found = {item["name"]: (item["value"], item["source"]) for item in document["settings"]}
    return found, document


def test_variables_win_over_the_file(configured, cli, monkeypatch):
    configured('model = "tiny"\noffline = true\nthreads = 2\ndtype = "float32"\n')
    found, _ = settings(cli)
    assert found["model"] == ("tiny", "file")
    assert found["offline"] == (True, "file")
    assert found["threads"] == ("2", "file")
    assert found["dtype"] == ("float32", "file")
    assert settings(cli, "--dtype", "float64")[0]["dtype"] == ("float64", "flag")
    monkeypatch.setenv("LLMCLI_MODEL", "smollm2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    found, _ = settings(cli)
    assert found["model"] == ("smollm2", "environment")
    assert found["offline"] == (False, "environment")
    assert found["threads"] == ("3", "environment")
    assert parsed("bench")[0]["model"] is parsed("bench")[0]["threads"] is None
    assert parsed("generate")[0]["offline"] is False


def test_a_configured_model_is_that_of_every_command(configured, cli, tiny):
    configured(f'model = "{tiny}"\nquiet = true\n')
    assert cli("info", "--json").json()["model"]["name"] == tiny
    assert cli("tokens", "hello", "--json").json()["model"]["name"] == tiny
    assert cli("info", "-m", "tiny", "--json").json()["model"]["name"] == "tiny"
    assert cli("info", "--families").code == 0


def test_env_shows_the_file_and_all_that_is_wrong_with_it(configured, cli):
    path = configured(
        'model = "tiny"\nstats = "full"\ntemprature = 1\n[chat]\nsystem = "a\\u001b[31m"\n'
        '[bench]\nhf-token = "hf_secret"\nn-gen = [1, 2]\n'
    )
    found, document = settings(cli)
    assert found["configuration"] == (str(path), "environment")
    assert found["model"] == ("smollm2", "default")  # no command would run
    configuration = document["configuration"]
    assert (configuration["path"], configuration["exists"]) == (str(path), True)
    assert configuration["options"] == [
        {"command": None, "option": "model", "value": "tiny"},
        {"command": "chat", "option": "system", "value": "a\x1b[31m"},
        {"command": "bench", "option": "n-gen", "value": [1, 2]},
    ]
    told = [(each["message"].split("`: ")[1], each["hint"]) for each in configuration["problems"]]
    usual = "correct it, or do without it: `LLMCLI_CONFIG= llmcli …`"
    assert sorted(told) == [
        ("`bench.hf-token` is not for a file", "secrets are not for this file: set HF_TOKEN"),
        ("`stats` is true or false, not `full`, for `llmcli chat`", usual),
        ("`temprature` is not an option of any command", "did you mean `temperature`?"),
    ]
    shown = cli("env")
    assert shown.code == 0
    assert "hf_secret" not in shown.out + json.dumps(document)
    assert "\x1b[31m" not in shown.out
    assert '[chat] system  "a\\u001b[31m"' in shown.out
    assert "`temprature` is not an option of any command" in shown.out
    assert "config key" not in shown.out
    configured('model = "tiny"\n')
    assert "config key model" in cli("env").out


def test_where_the_file_is(cli, monkeypatch, tmp_path):
    monkeypatch.delenv("LLMCLI_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
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


WRONG = {
    "not toml": ("x = ", "it is not TOML: invalid value (at end of document)"),
    "not utf-8": (b'system = "\xff"', "it is not UTF-8"),
    "deep": ("a = " + "[" * 20_000, "it is nested too deeply"),
    "digits": ("seed = " + "9" * 5000, "it is not TOML: exceeds the limit"),
    "large": ("#" * (1 << 20) + "\n", "it is larger than 1 MiB"),
    "unknown": ("temprature = 1", "`temprature` is not an option of any command"),
    "unknown in a table": ("[tokens]\ntemperature = 1", "`tokens.temperature` is not an option of"),
    "no command": ("[chatt]\n", "there is no command `chatt`"),
    "a table of a table": ("[tokens.device]\nx = 1", "takes a text or a number, not a table"),
    "twice": ("top_k = 1\ntop-k = 2", "`top_k` and `top-k` are one option"),
    "type": ('threads = "many"', "`threads` takes a whole number, not `many`"),
    "fraction": ("threads = 1.5", "`threads` takes a whole number, not `1.5`"),
    "flag": ("offline = 1", "`offline` is true or false, not `1`"),
    "flag for a text": ("device = true", "`device` takes a text or a number, not true or false"),
    "date": ("device = 2020-01-01", "`device` takes a text or a number, not a date or time"),
    "list": ('device = ["cpu"]', "`device` takes one value, not a list"),
    "lists": ('[tokens]\ndevice = "cpu"\nthreads = [[1]]', "`tokens.threads` takes one value"),
    "range": ("threads = 0", "`threads` must be between 1 and 4096, not `0`"),
    "choice": ('dtype = "float31"', "`dtype` has no choice `float31`"),
    "refused": ("json = true", "`json` is not for a file"),
    "long": (f'dtype = "{"x" * 9999}"', "has no choice `xxx"),
    "control characters": ('"a\\u001b[31m" = 1', "`a\\x1b[31m` is not an option"),
}  # fmt: skip


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


def test_a_file_that_cannot_be_read_is_an_error(cli, monkeypatch, tmp_path):
    folder, fifo, locked = tmp_path / "folder", tmp_path / "fifo", tmp_path / "locked.toml"
    folder.mkdir()
    os.mkfifo(fifo)
    locked.write_text("quiet = true\n")
    opened = Path.open

    def refuse(path, *argv, **options):  # as for anybody but root
        if path == locked:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *argv, **options)

    monkeypatch.setattr(Path, "open", refuse)
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


@pytest.mark.parametrize("text", ["x = ", "temprature = 1", "threads = 0"])
def test_help_and_env_work_with_a_file_that_is_wrong(configured, cli, monkeypatch, text):
    configured(text)
    monkeypatch.setenv("SHELL", "/bin/bash")
    for argv in (["--help"], [], ["--version"], ["--show-completion"], ["chat", "--help"], ["env"],
                 ["generate", "hello", "-h"], ["env", "--json"]):  # fmt: skip
        result = cli(*argv)
        assert (result.code, result.err) == (0, "")
    (problem,) = result.json()["configuration"]["problems"]
    assert "configuration file" in problem["message"]
    assert cli("env", "--threads", "0").code == 2


def test_help_does_not_read_the_file_and_a_command_reads_it_once(configured, cli, monkeypatch):
    configured("quiet = true\n")
    read = []
    whole = file_module._bytes
    monkeypatch.setattr(
        file_module, "_bytes", lambda *a, **k: (read.append(a), whole(*a, **k))[1]
    )
    for argv in (["--help"], ["--version"], ["generate", "--help"], ["score", "x", "-h"]):
        cli(*argv)
    assert read == []
    assert cli("tokens", "hello", "-m", "tiny").code == 0
    assert len(read) == 1


def test_an_error_about_what_the_file_sets_names_it(configured, cli, tiny):
    path = configured('device = "cudaa"\nmodel = "./nosuch"\n[bench]\nthreads = "x"\n')
    wrong = cli("generate", "hello", "-m", "tiny")
    assert f"`cudaa` is not a device; `device` is set in `{path}`" in wrong.err
    assert "set in" not in cli("generate", "hello", "-m", "tiny", "--device", "cudab").err
    missing = cli("tokens", "hello")
    assert missing.code == 3
    assert f"`./nosuch`; `model` is set in `{path}`" in missing.err
    swept = cli("bench", "-m", tiny)
    assert f"`threads` is set in `{path}`" in swept.err
    assert "set in" not in cli("tokens", "hello", "-m", "./nowhere").err


def test_a_saved_conversation_wins_over_the_file(configured, cli, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    talker = write_tiny(tmp_path / "m", weights=True, max_position_embeddings=600)
    file = tmp_path / "talk.json"
    turn = ("chat", "-m", talker, "--prompt", "hello", "--save", file)
    assert cli(*turn, "--seed", "3", "-t", "0.5", "-n", "4", "--system", "be brief").code == 0
    sampling = "seed = 9\ntemperature = 0.75\ntop-k = 3\nmax-tokens = 2\n"
    configured(f'[chat]\n{sampling}system = "sing"\nset = "x=1"\n')
    assert cli(*turn, "--load", file, "-k", "5").code == 0
    found = json.loads(file.read_text())
    assert (found["sampling"]["seed"], found["sampling"]["temperature"]) == (3, 0.5)
    assert (found["sampling"]["max_tokens"], found["sampling"]["top_k"]) == (4, 5)
    assert found["messages"][0]["content"] == "be brief"
    assert found["variables"] == {}
    assert cli(*turn).code == 0
    found = json.loads(file.read_text())
    assert (found["sampling"]["seed"], found["sampling"]["temperature"]) == (9, 0.75)
    assert (found["messages"][0]["content"], found["variables"]) == ("sing", {"x": 1})


def test_no_child_of_a_test_reads_the_developers_file(tmp_path):
    folder = tmp_path / ".config" / "llmcli"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("x = \n")
    argv = [sys.executable, "-m", "llmcli", "models"]
    environment = {name: value for name, value in os.environ.items() if name != "LLMCLI_CONFIG"}
    environment |= {"HOME": str(tmp_path)}
    environment.pop("XDG_CONFIG_HOME", None)
    assert children.run(argv, env=environment, capture_output=True).returncode == 0
    environment |= {"LLMCLI_CONFIG": str(folder / "config.toml")}
    assert children.run(argv, env=environment, capture_output=True).returncode == 2


@pytest.mark.parametrize("why", ["permission denied", "file name too long"])
def test_env_shows_a_folder_that_may_not_be_read(cli, monkeypatch, tmp_path, why):
    """The machine is shown all the same, and what is wrong with the file."""
    folder = tmp_path / ("a" * 300 if why == "file name too long" else "closed")
    monkeypatch.delenv("LLMCLI_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    if why == "permission denied":  # root may read everything
        there = Path.stat

        def stat(path, **options):
            if path.is_relative_to(folder):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return there(path, **options)

        monkeypatch.setattr(Path, "stat", stat)
    result = cli("env")
    assert result.code == 0
    assert f"config.toml`: {why}" in " ".join(result.out.split())
    assert "no such file" not in result.out
