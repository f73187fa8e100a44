"""Completion: real shells complete with the scripts of the package, which ask `_complete`."""

import json
import os
import re
import shlex
import shutil
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import children
import pytest
from chat_terminal import Window
from full_disk import largest_file
from hub_cache_files import write_revision
from programs import ended, start

import llmcli
from llmcli.checkpoints import CATALOG
from llmcli.cli.complete import candidates, lines
from llmcli.cli.completion import FILES, script
from llmcli.cli.tree import root

FOLDER = Path(llmcli.__file__).parent / "assets" / "completions"


def need(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is NOT INSTALLED here: its completion is not tested")


BASH = """
for line in "$@"; do
    COMP_WORDS=($line); [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _llmcli llmcli "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    printf "%s\\n" "${COMPREPLY[@]}" =====
done
"""


def bash(*lines, cwd=FOLDER):
    """What bash offers for the last word of each line, through its own completion variables."""
    source = f'source "{FOLDER / FILES["bash"]}"; set -f; {BASH}'
    return offered(["bash", "--norc", "-c", source, "bash", *lines], cwd=cwd)


def fish(*lines, home, cwd):
    """What fish offers for the end of each line."""
    need("fish")
    source = f'source "{FOLDER / FILES["fish"]}"'
    each = "for line in $argv; complete -C $line; echo =====; end"
    found = offered(
        ["fish", "--no-config", "-c", f"{source}; {each}", *lines], cwd=cwd,
        env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    return [[row.split("\t")[0] for row in rows] for rows in found]


def offered(argv, **how):
    """The rows that a shell writes for each line, which `=====` ends."""
    done = children.run(argv, capture_output=True, text=True, check=True, **how)
    assert done.stderr == ""
    *found, last = done.stdout.split("=====\n")
    assert last == ""
    return [[row for row in rows.splitlines() if row] for rows in found]


@pytest.fixture
def models(tmp_path):
    """A directory with models, and something else, in it."""
    for name in ("gpt2t", "smooth", ".hidden"):
        (tmp_path / name).mkdir()
    for name in ("gguf.gguf", "w.safetensors", "notes.txt", "gpt2t/x.gguf", "gpt2t/y.txt"):
        (tmp_path / name).write_text("")
    return tmp_path


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Caches of its own, a model of the hub in one of them, and `tiny` where none is named."""
    files = ("config.json", "model.safetensors", "tokenizer.json")
    write_revision(tmp_path / "hub", "org/some", dict.fromkeys(files, b"{}"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("LLMCLI_MODEL", "tiny")
    return tmp_path


@pytest.fixture
def values(home):
    """An empty directory in it."""
    (home / "empty").mkdir()
    return home / "empty"


@pytest.fixture
def answered_here(tmp_path_factory, monkeypatch):
    """The first `llmcli` on the PATH asks this process, which has no start-up to wait for."""
    folder = tmp_path_factory.mktemp("asked")
    question, answer = folder / "question", folder / "answer"
    for pipe in (question, answer):
        os.mkfifo(pipe)
    program = folder / "llmcli"
    program.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {question}\nexec cat {answer}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def answering():
        while words := question.read_text().split("\0")[:-1]:
            said = []
            with suppress(Exception):
                assert words[0] == "_complete"
                said = lines(words[1], words[2:])
            answer.write_text("".join(f"{line}\n" for line in said))

    thread = threading.Thread(target=answering)
    thread.start()
    yield
    question.write_text("")
    thread.join()


def test_a_description_is_the_first_sentence_of_the_help():
    sentence = "Maximum number of tokens (8k: 8192), prompt and text together"
    asked = ["llmcli", "generate", "--context-l"]
    assert list(lines("zsh", asked)) == ["words", f"--context-length:{sentence}"]


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize("place", ["files", "models", "values"])
def test_what_is_offered(place, shell, request, tmp_path, monkeypatch, answered_here, as_written):
    """For the last word of each line of a file, in one shell or alike in two.

    Among the committed files, in a directory with models, and values in an empty one; zsh needs a
    terminal, see below.
    """
    cwd = FOLDER if place == "files" else request.getfixturevalue(place)
    monkeypatch.chdir(cwd)
    file, found = Path(__file__).with_name(f"completed-{place}.txt"), []
    rows = [
        re.fullmatch(r"(bash|fish|bash\+fish): (.*?) →(.*)", row).groups()
        for row in file.read_text("utf-8").splitlines()
    ]
    ask = {"bash": bash, "fish": partial(fish, home=tmp_path)}[shell]
    answers = iter(ask(*(line for shells, line, _ in rows if shell in shells), cwd=cwd))
    for shells, line, kept in rows:
        answer = next(answers) if shell in shells else kept.split()
        if place == "models":
            answer.sort()
        # where bash has said it before, fish has an order of its own for values
        if place == "values" and shell == "fish" and "bash" in shells:
            answer.sort(key=kept.split().index if {*answer} <= {*kept.split()} else None)
        found.append(f"{shells}: {line} → {' '.join(answer)}".rstrip())
    as_written(file, "\n".join(found) + "\n")


def test_fish_asks_the_program(home):
    assert fish("llmcli lens --layer ", home=home, cwd=home) == [["0", "1", "2", "3"]]
    assert fish("llmcli ladder --rung ca", home=home, cwd=home) == [["cache"]]


def test_bash_registers_the_function():
    done = children.run(
        ["bash", "--norc", "-c", f'source "{FOLDER / FILES["bash"]}"; complete -p llmcli'],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "-F _llmcli llmcli" in done.stdout


def test_bash_continues_behind_a_colon(home):
    """`hf:org/name` is three words to bash, which puts only the last of them in."""
    write_revision(home / "hub", "org/some", {"x.gguf": b""})
    lines = ("llmcli generate --device cuda : 1", "llmcli generate -m hf : org/so")
    assert bash(*lines) == [[], ["org/some/x.gguf"]]


CLEAR = "\x15"  # of the line
SOURCED = f'autoload -Uz compinit; compinit -u -D; source {FOLDER / FILES["zsh"]}'


def zsh_in(home, cwd=FOLDER, begin=SOURCED):
    """An interactive zsh that has run `begin`: its completion works on a terminal alone."""
    need("zsh")
    how = {"HOME": str(home), "TERM": "dumb", "PS1": "> ", "COLUMNS": "400"}
    zsh = Window(["zsh", "-f", "-i"], columns=400, cwd=cwd, **how)
    zsh.type(f"{begin}; echo READY$((40 + 2))\n", "READY42")
    return zsh


def test_zsh(home, answered_here, monkeypatch):
    """TABs of each kind: a word, an option, what is continued, a file, a list with its end."""
    (home / "gpt2t").mkdir()
    monkeypatch.chdir(home)
    zsh = zsh_in(home, home)
    for keys, line in (
        ("llmcli gen", "llmcli generate "),
        ("llmcli generate --dtype float3", "--dtype float32 "),
        ("llmcli models pul", "models pull "),
        ("llmcli models pull tiny smollm2-b", "smollm2-bf16 "),
        ("llmcli attention --metrics entropy,induc\t,dup", "entropy,induction,duplicate"),
        ("llmcli attention -o heads.pn", "heads.png "),
        ('llmcli dump --name "blocks.*.attn.patt', "attn.pattern"),
        ("llmcli generate -m org/s", "org/some "), ("llmcli score --model gp", "./gpt2t/"),
    ):  # fmt: skip
        zsh.type(f"{CLEAR}{keys}\t", line)
    seen = zsh.type(CLEAR + "llmcli attention --layer \t", "3")
    assert re.search("(?s)0.*1.*2", seen)
    assert "not found" not in zsh.raw


def test_zsh_finds_it_on_fpath(tmp_path):
    zsh = zsh_in(tmp_path, begin=f"fpath+=({FOLDER}); autoload -Uz compinit; compinit -u -D")
    zsh.type("llmcli tok\t", "llmcli tokens ")


@pytest.mark.parametrize(("shell", "file", "start_up"), [
    ("bash", ".local/share/llmcli/llmcli.bash", ".bashrc"),
    ("zsh", ".local/share/llmcli/zsh/_llmcli", ".zshrc"),
    ("fish", ".config/fish/completions/llmcli.fish", None),
])
def test_install(cli, monkeypatch, tmp_path, shell, file, start_up):
    """The shell that is named, whatever the tests were started from, in an empty home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        result = cli("--install-completion", shell)
        assert result.code == 0, result.err
        assert f"wrote {tmp_path / file}" in result.out
        assert (tmp_path / file).read_text() == script(shell) == cli("--show-completion", shell).out
        files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        assert files == {file, start_up} - {None}
        if start_up is not None:
            lines = (tmp_path / start_up).read_text().splitlines()
            assert len(lines) == 1  # the second time adds nothing


def test_where_none_is_named_it_is_the_shell_that_starts_it(monkeypatch):
    """Else that of $SHELL."""
    monkeypatch.setenv("SHELL", "/bin/fish")
    line = f"{shlex.quote(sys.executable)} -m llmcli --show-completion; true"
    done = children.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.stdout == script("bash")
    assert ended(start("--show-completion"))[0].decode() == script("fish")
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert "no completion for the shell `tcsh`" in ended(start("--show-completion"), 2)[1]


def test_an_answer_needs_no_torch_and_no_network(home):
    code = """
import socket, sys
def refused(*a, **k): raise SystemExit('the network')
socket.socket.connect = refused
from llmcli.cli.app import main
for model in sys.argv[1:]:
    print('=', model)
    for words in ('dump -m', 'models path', 'dump -m M --name', 'lens -m M --layer'):
        line = [model if word == 'M' else word for word in words.split()]
        main(['_complete', 'bash', 'llmcli', *line, ''])
heavy = {'torch', 'pydantic', 'rich', 'transformers'} & set(sys.modules)
assert not heavy, heavy
"""
    models = ("tiny", "smollm2-bf16", "org/some", "nonsense name", "./nowhere")
    done = children.run(
        [sys.executable, "-c", code, *models], capture_output=True, text=True, cwd=home
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ["blocks." in one for one in done.stdout.split("= ")[1:]] == [True] * len(models)


def test_names_are_read_again_where_the_model_changed(cli, home):
    """A cache that cannot be written only costs time."""
    folder = home / "model"
    folder.mkdir()
    shutil.copytree(CATALOG["tiny"].file, folder, dirs_exist_ok=True)
    ask = ("_complete", "fish", "llmcli", "attention", "-m", str(folder), "--layer", "")
    assert cli(*ask).out.split() == ["0", "1", "2", "3"]
    assert len(list((home / "own" / "completion").iterdir())) == 1
    settings = json.loads((folder / "config.json").read_text())
    settings["n_layer"] = 2
    (folder / "config.json").write_text(json.dumps(settings))
    assert cli(*ask).out.split() == ["0", "1"]
    for file in (home / "own" / "completion").iterdir():
        file.write_text("{}")
    assert cli(*ask).out.split() == ["0", "1"]
    shutil.rmtree(home / "own" / "completion")
    (home / "own" / "completion").write_text("a file")
    assert cli(*ask).out.split() == ["0", "1"]


def test_an_answer_on_a_full_disk_keeps_nothing(cli, home):
    with largest_file(100):
        answered = cli("_complete", "fish", "llmcli", "lens", "--layer", "")
    assert (answered.out.split(), answered.err) == (["0", "1", "2", "3"], "")
    assert list((home / "own" / "completion").iterdir()) == []


def test_file_endings_are_those_of_the_command(cli, home):
    """A refusal lists what the command writes; `chat` writes JSON whatever its file is called."""
    written = [
        (name, option.opts[-1])
        for name, entry in root().entries.items()
        for option in root().get_command(None, name).params
        if str(option.metavar).startswith("FILE")
        and candidates([name, option.opts[-1]], "")[0] == "files"
    ]
    assert len(written) == 11
    for command, option in written:
        offered = lines("fish", ["llmcli", command, option, f"{home}/new"])
        endings = {name.rpartition(".")[2] for name in offered}
        more = ["--name", "logits"] if command == "dump" else []
        if command != "chat":
            result = cli(command, "x", option, "out.nothing", "-m", "tiny", *more)
            assert result.code == 2
            told = result.err.split(": use ")[1].splitlines()[0]
            assert set(re.findall(r"\.(\w+)\b", told)) == endings
