"""Completion: real shells complete with the scripts of the package, which ask `_complete`."""

import json
import os
import pty
import re
import select
import shlex
import shutil
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import children
import pytest
from full_disk import largest_file

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
    snapshot = tmp_path / "hub" / "models--org--some" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    references = tmp_path / "hub" / "models--org--some" / "refs"
    references.mkdir()
    (references / "main").write_text("a" * 40)
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


def test_bash_registers_the_function():
    done = children.run(
        ["bash", "--norc", "-c", f'source "{FOLDER / FILES["bash"]}"; complete -p llmcli'],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "-F _llmcli llmcli" in done.stdout


def test_bash_continues_behind_a_colon(home):
    """`hf:org/name` is three words to bash, which puts only the last of them in."""
    file = home / "hub" / "models--org--some" / "snapshots" / ("a" * 40) / "x.gguf"
    file.write_text("")
    lines = ("llmcli generate --device cuda : 1", "llmcli generate -m hf : org/so")
    assert bash(*lines) == [[], ["org/some/x.gguf"]]


class Zsh:
    """An interactive zsh on a pseudo-terminal: its completion works nowhere else."""

    def __init__(self, home: Path, cwd: Path = FOLDER) -> None:
        pid, self.terminal = pty.fork()
        if pid == 0:
            os.chdir(cwd)
            os.environ.update(HOME=str(home), TERM="dumb", PS1="> ", COLUMNS="400")
            os.execvp("zsh", ["zsh", "-f", "-i"])
        self.pid = pid

    def type(self, text: str, wait_for: str) -> str:
        """Types `text` and returns what came until `wait_for` was in it."""
        os.write(self.terminal, text.encode())
        seen = ""
        end = time.monotonic() + 20
        while not re.search(wait_for, seen):
            ready, _, _ = select.select([self.terminal], [], [], 0.5)
            if ready:
                seen += os.read(self.terminal, 65536).decode(errors="replace")
            assert time.monotonic() < end, f"zsh said {seen!r}"
        return seen

    def close(self) -> None:
        os.close(self.terminal)
        os.waitpid(self.pid, 0)


CLEAR = "\x15"  # of the line
SOURCED = f'autoload -Uz compinit; compinit -u -D; source {FOLDER / FILES["zsh"]}'


@contextmanager
def zsh_in(home, cwd=FOLDER, begin=SOURCED):
    """A zsh that has run `begin`."""
    need("zsh")
    zsh = Zsh(home, cwd)
    try:
        zsh.type(f"{begin}; echo READY$((40 + 2))\n", "READY42")
        yield zsh
    finally:
        zsh.close()


def test_zsh(home):
    """One TAB of each kind: a word, an option, what is continued, a file, a list with its end."""
    (home / "gpt2t").mkdir()
    with zsh_in(home, home) as zsh:
        zsh.type("llmcli gen\t", "llmcli generate ")
        zsh.type(CLEAR + "llmcli generate --dtype float3\t", "--dtype float32 ")
        zsh.type(CLEAR + "llmcli models pul\t", "models pull ")
        zsh.type("tiny smollm2-b\t", "smollm2-bf16 ")
        zsh.type(CLEAR + "llmcli attention --metrics entropy,induc\t", "entropy,induction")
        zsh.type(CLEAR + "llmcli attention -o heads.pn\t", r"heads\.png ")
        zsh.type(CLEAR + 'llmcli dump --name "blocks.*.attn.patt\t', r"attn\.pattern")
        zsh.type(CLEAR + "llmcli generate -m org/s\t", "org/some ")
        zsh.type(CLEAR + "llmcli score --model gp\t", r"\./gpt2t/")
        seen = zsh.type(CLEAR + "llmcli attention --layer \t", r"(?s)0.*1.*2.*3")
        assert "not found" not in seen


def test_zsh_finds_it_on_fpath(tmp_path):
    with zsh_in(tmp_path, begin=f"fpath+=({FOLDER}); autoload -Uz compinit; compinit -u -D") as zsh:
        zsh.type("llmcli tok\t", "llmcli tokens ")


@pytest.fixture
def own_home(monkeypatch, tmp_path):
    """An empty home, in which completion is installed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("shell", "file", "start_up"), [
    ("bash", ".local/share/llmcli/llmcli.bash", ".bashrc"),
    ("zsh", ".local/share/llmcli/zsh/_llmcli", ".zshrc"),
    ("fish", ".config/fish/completions/llmcli.fish", None),
])
def test_install(cli, own_home, tmp_path, shell, file, start_up):
    """The shell that is named, whatever the tests were started from."""
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


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--install-completion", "--help"], 0, "usage: llmcli COMMAND"),
    (["-h", "--install-completion"], 0, "usage: llmcli COMMAND"),
    (["--show-completion", "zsh", "-h"], 0, "usage: llmcli COMMAND"),
    (["--install-completion", "nosuch"], 2, "for the shell `nosuch`\nhint: name one of bash,"),
    (["--show-completion", "tcsh"], 2, "no completion for the shell `tcsh`"),
    (["--install-completion", "zsh", "fish"], 2, "takes one shell, not `zsh fish`"),
    (["--install-completion", "generate"], 2, "for the shell `generate`"),
])
def test_nothing_is_installed_where_something_else_was_asked(
    cli, own_home, tmp_path, words, code, said
):
    result = cli(*words)
    assert (result.code, said in result.out + result.err) == (code, True)
    assert list(tmp_path.iterdir()) == []


def test_where_none_is_named_it_is_the_shell_that_starts_it():
    """Else that of $SHELL."""
    show = [sys.executable, "-m", "llmcli", "--show-completion"]

    def run(argv, shell):
        environ = {**os.environ, "SHELL": shell}
        return children.run(argv, env=environ, capture_output=True, text=True)

    assert run(["bash", "-c", f"{shlex.join(show)}; true"], "/bin/fish").stdout == script("bash")
    assert run(show, "/bin/fish").stdout == script("fish")
    refused = run(show, "/bin/tcsh")
    assert refused.returncode == 2
    assert "no completion for the shell `tcsh`" in refused.stderr


def test_a_home_that_cannot_be_written(cli, own_home, monkeypatch, tmp_path):
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    result = cli("--install-completion", "fish")
    assert result.code == 1
    assert result.err.startswith("error: could not install completion in ")


def test_an_answer_needs_no_torch_and_no_network(home):
    code = (
        "import socket, sys\n"
        "def refused(*a, **k): raise SystemExit('the network')\n"
        "socket.socket.connect = refused\n"
        "from llmcli.cli.app import main\n"
        "for model in sys.argv[1:]:\n"
        "    print('=', model)\n"
        "    for words in ('dump -m', 'models path', 'dump -m M --name', 'lens -m M --layer'):\n"
        "        line = [model if word == 'M' else word for word in words.split()]\n"
        "        main(['_complete', 'bash', 'llmcli', *line, ''])\n"
        "heavy = {'torch', 'pydantic', 'rich', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    models = ("tiny", "smollm2-bf16", "org/some", "nonsense name", "./nowhere")
    done = children.run(
        [sys.executable, "-c", code, *models], capture_output=True, text=True, cwd=home
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ["blocks." in one for one in done.stdout.split("= ")[1:]] == [True] * len(models)


@pytest.mark.parametrize(
    "argv", [[], ["bash"], ["no-shell", "llmcli", "x"], ["bash", "llmcli", "nonsense", "--x", "y"]]
)
def test_a_question_that_makes_no_sense_has_no_answer(cli, home, argv):
    result = cli("_complete", *argv)
    assert (result.code, result.out.split()[1:], result.err) == (0, [], "")


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


def test_the_configuration_file_names_the_model(cli, home, monkeypatch):
    monkeypatch.delenv("LLMCLI_MODEL")
    (home / "config.toml").write_text('model = "tiny"\n[attention]\nmodel = "org/none"\n')
    monkeypatch.setenv("LLMCLI_CONFIG", str(home / "config.toml"))
    ask = ("_complete", "fish", "llmcli")
    assert cli(*ask, "lens", "--layer", "").out.split() == ["0", "1", "2", "3"]
    assert cli(*ask, "attention", "--layer", "").out == ""


def test_file_endings_are_those_of_the_command(cli, home):
    """A refusal lists what the command writes; `chat` writes JSON whatever its file is called."""
    written = [
        (name, option.opts[-1])
        for name, entry in root().entries.items()
        for option in root().get_command(None, name).params
        if str(option.metavar).startswith("FILE")
        and candidates([name, option.opts[-1]], "")[0] == "files"
    ]
    assert len(written) == 7
    for command, option in written:
        offered = lines("fish", ["llmcli", command, option, f"{home}/new"])
        endings = {name.rpartition(".")[2] for name in offered}
        more = ["--name", "logits"] if command == "dump" else []
        if command != "chat":
            result = cli(command, "x", option, "out.nothing", "-m", "tiny", *more)
            assert result.code == 2
            told = result.err.split(": use ")[1].splitlines()[0]
            assert set(re.findall(r"\.(\w+)\b", told)) == endings
