"""Every way in which llmcli writes, on a disk that is full: one line, the old file, no left-overs.

The system refuses bytes here, not a stand-in: a limit on the size of files for those that are
named, /dev/full for stdout.
"""

import ast
import contextlib
import errno
import io
import os
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from cli_tiny import write_tiny
from full_disk import largest_file
from programs import pipe

import llmcli
from llmcli.checkpoints.catalog import CATALOG
from llmcli.cli.app import main
from llmcli.cli.tree import ENTRIES, NESTED
from llmcli.commands.selftest.measure import run
from llmcli.commands.selftest.report import GroupResult
from llmcli.errors import WriteFailed
from llmcli.records.document import ViewCheck
from llmcli.shell import files
from llmcli.shell.files import whole_file

TESTS = Path(__file__).parents[1]
ROOT = Path(llmcli.__file__).parent
BENCH = str(TESTS / "data" / "llama_bench" / "results.json")
FULL = "error: could not write the output: no space left on device"

# every function that makes or fills a file with the test that has it meet a full disk, and those
# that write where no disk can be full
WRITES, ELSEWHERE = (
    dict(row.split(" ", 1) for row in part.splitlines())
    for part in Path(__file__).with_name("writers.txt").read_text("utf-8").split("\n\n")
)


# a line of every command that writes a file which the user names, with that file; of each command
# that has something to say; and more of some
FILES, COMMANDS, MORE = (
    [line.replace("BENCH", BENCH) for line in part.splitlines()]
    for part in Path(__file__).with_name("full-disk-lines.txt").read_text().split("\n\n")
)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    return str(write_tiny(
        tmp_path_factory.mktemp("recurrent") / "m", architectures=["Mamba2ForCausalLM"],
        model_type="mamba2", num_heads=8, head_dim=8, n_groups=1, state_size=8,
    ))  # fmt: skip


def of(argv, weighted, mixture, recurrent):
    """The options of the model that the command is about."""
    if "state" in argv:
        return "-m", recurrent, "--random-weights"
    return ("-m", mixture, "--random-weights") if argv[0] == "experts" else ("-m", weighted)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Caches of its own, and what takes long is brief: values are nothing here."""
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    check = GroupResult(
        check=ViewCheck(name="a", words="b", value=0, tolerance=0), cases=1, seconds=0
    )
    for name in ("measure_levels", "measure_exhaustion"):
        monkeypatch.setattr(run, name, lambda *_, **__: check)
    monkeypatch.setattr(run, "measure_groups", lambda *_, **__: [check])
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")


@pytest.mark.parametrize(
    "argv", [shlex.split(line) for line in FILES], ids=lambda argv: f"{argv[0]}-{argv[-1]}"
)
def test_a_file_that_a_command_writes(cli, weighted, mixture, recurrent, argv):
    out = Path(argv[-1])
    run = partial(cli, *argv, *of(argv, weighted, mixture, recurrent), "--dtype", "float32", "-q")
    old = b'{"schema": "llmcli.chat/1"}'  # chat replaces nothing else
    out.write_bytes(old)
    with largest_file(0):  # before the first byte
        first = run()
    with largest_file(600):  # in the middle of it
        second = run()
    for result in (first, second):
        assert result.code == 1
        error, hint = result.err.splitlines()
        assert error == f"error: could not write `{out}`: file too large"
        assert hint == "hint: write to another file or directory"
        assert os.listdir() == [out.name]
        assert out.read_bytes() == old
    assert run().code == 0
    assert out.stat().st_size > 600
    assert os.listdir() == [out.name]


@pytest.mark.parametrize(("of", "step"), [
    (os, "open"), (files, "_File"), (os, "chmod"), (os, "fsync"), (os, "replace"),
])
def test_no_step_of_a_whole_file_leaves_half_of_it(tmp_path, monkeypatch, of, step):
    path = tmp_path / "a.npz"
    path.write_bytes(b"old")

    def full(*args, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(of, step, full)
    told = pytest.raises(WriteFailed, match=r"a\.npz`: no space left on device")
    with told as caught, whole_file(str(path)) as file:
        file.write(b"new")
    assert caught.value.hint == "make room on the disk, or write to another one"
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["a.npz"]


def test_a_pipe_that_a_file_goes_to_needs_room_beside_it(tmp_path):
    with pipe(tmp_path / "pipe") as reading:
        with pytest.raises(WriteFailed, match="file too large"), largest_file(10):  # noqa: SIM117
            with whole_file(str(tmp_path / "pipe")) as file:
                file.write(b"x" * 100)
        assert os.read(reading, 10) == b""


@pytest.mark.parametrize(("shell", "script", "start_up"), [
    ("bash", "data/llmcli/llmcli.bash", ".bashrc"),
    ("zsh", "data/llmcli/zsh/_llmcli", ".zshrc"),
    ("fish", "config/fish/completions/llmcli.fish", None),
])
def test_completion_is_installed_whole_or_not_at_all(
    cli, monkeypatch, tmp_path, shell, script, start_up
):
    for name, folder in (("HOME", ""), ("XDG_DATA_HOME", "data"), ("XDG_CONFIG_HOME", "config")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("ZDOTDIR", raising=False)
    target = tmp_path / script
    target.parent.mkdir(parents=True)
    target.write_text("old")
    for limit in (0, 100):
        with largest_file(limit):
            result = cli("--install-completion", shell)
        assert result.code == 1
        assert result.err.startswith(f"error: could not write `{target}`: file too large")
        assert os.listdir(target.parent) == [target.name]
        assert target.read_text() == "old"
    if start_up is not None:
        before = b"# mine\nexport LANG=\xe9\n" + b"#" * 200_000  # without a last newline
        (tmp_path / start_up).write_bytes(before)
        for room in (0, 5):
            with largest_file(len(before) + room):
                result = cli("--install-completion", shell)
            assert result.code == 1
            where = f"error: could not install completion in `{tmp_path / start_up}`: "
            assert result.err.startswith(where)
            assert (tmp_path / start_up).read_bytes() == before
    assert cli("--install-completion", shell).code == 0
    assert target.stat().st_size > 100


LINES = {name: shlex.split(words) for name, _, words in (one.partition(":") for one in COMMANDS)}
NO_MODEL = ("selftest", "bench compare", "models", "env")


def test_every_command_has_a_line_here():
    assert set(LINES) == set(ENTRIES) | set(NESTED)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("argv", [
    *([*name.split(), *LINES[name]] for name in LINES), *map(shlex.split, MORE),
], ids=lambda argv: " ".join(argv[:3]).replace(str(TESTS), ""))
def test_what_a_command_says(capsys, weighted, mixture, recurrent, monkeypatch, argv):
    if argv[0] in LINES and "--help" not in argv and not " ".join(argv).startswith(NO_MODEL):
        argv = [*argv, *of(argv, weighted, mixture, recurrent)]
    if argv[0] == "models":  # something to be removed
        file = CATALOG["smollm2"].file
        (file.parent / ".fetch-left").mkdir(parents=True)
        file.touch()
        os.truncate(file, CATALOG["smollm2"].size)  # a hole, which takes no room
    with open("/dev/full", "wb", buffering=0) as raw:
        stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
        monkeypatch.setattr("sys.stdout", stream)
        code = main(argv)
        with contextlib.suppress(OSError):  # what could not be written is tried once more
            stream.close()
    err = capsys.readouterr().err
    assert code == 1, err
    told = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert told == [FULL, "hint: write to another file or directory"]


OPENS = ("open", "fdopen", "FileIO", "ZipFile")
LINKS = ("os.replace", "os.truncate", "os.link", "os.write", "np.save", "torch.save")
UNSURE = ("link", "write", "save", "replace", "truncate", "snapshot_download")
MAKES = (
    "write_text", "write_bytes", "mkdtemp", "mkstemp", "TemporaryDirectory", "TemporaryFile",
    "NamedTemporaryFile", "SpooledTemporaryFile", "symlink_to", "hardlink_to", "touch",
    "symlink", "copyfile", "copy2", "copytree", "copyfileobj", "move", "rename", "ftruncate",
    "tofile", "savez", "savez_compressed", "save_file", "serialize_file", "export_chrome_trace",
    "hf_hub_download", "whole_file", "write_file", "write_document",
)  # fmt: skip
# where no such call stands a file need not be parsed
MAY = re.compile(
    rf"\b({'|'.join((*OPENS, *MAKES, 'link', 'snapshot_download', *LINKS))})\("
    r"|\.(replace|truncate)\((?![^()]*,)"
)


def calls(node, where=""):
    """(qualified name of the function around it, call) of all calls below `node`."""
    for child in ast.iter_child_nodes(node):
        inner = where
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{where}.{child.name}".strip(".")
        elif isinstance(child, ast.Call):
            yield where, child
        yield from calls(child, inner)


def writes(call):
    """Whether a call makes or fills a file, or may."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in MAKES:
        return True
    if name not in OPENS + UNSURE:
        return False
    called, whole = ast.unparse(call.func), ast.unparse(call)
    words = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name in ("link", "write", "save") or called in ("os.replace", "os.truncate"):
        return called in LINKS
    if name in ("replace", "truncate"):  # of a path: strings and sequences give more, or a list
        return len(words) == 1 and isinstance(words[0], ast.Name | ast.Attribute | ast.Call)
    if name == "snapshot_download":
        return "local_files_only=True" not in whole
    if called == "os.open":
        return any(flag in whole for flag in ("O_WRONLY", "O_RDWR", "O_CREAT"))
    if called.startswith(("archive.", "ours.", "slot.")):  # a member of a zip, an engine
        return False
    modes = [w for w in words if not isinstance(w, ast.Constant) or isinstance(w.value, str)]
    if isinstance(call.func, ast.Name) or name in ("fdopen", "FileIO", "ZipFile"):
        modes = modes[1:] if call.args else modes  # the first is the file
    return any(not isinstance(w, ast.Constant) or set(w.value) & set("wax+") for w in modes[:1])


def found(source, module):
    if not MAY.search(source):
        return
    for where, call in calls(ast.parse(source)):
        if writes(call):
            yield f"{module}:{where}"


def test_no_other_function_writes():
    files = [f for f in ROOT.rglob("*.py") if not f.is_relative_to(ROOT / "assets")]
    sites = set()
    for file in files:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        sites |= set(found(file.read_text(encoding="utf-8"), module))
    known = {*WRITES, *ELSEWHERE}
    assert sorted(sites - known) == [], "give it a line in writers.txt, and a test on a full disk"
    assert sorted(known - sites) == [], "there is no such function any more"
    for test in WRITES.values():
        file, _, name = test.partition("::")
        assert f"def {name}" in (TESTS / file).read_text(encoding="utf-8"), test


def test_a_new_one_would_be_found_and_what_only_reads_is_not():
    writing = """
        open(path, "w"); open(path, mode="ab"); path.open("x+"); open(path, mode)
        path.write_text(x); os.open(path, os.O_CREAT | os.O_WRONLY); path.replace(other)
        zipfile.ZipFile(path, "a"); whole_file(path); shutil.copyfile(a, b); os.replace(a, b)
        tempfile.mkdtemp(); os.fdopen(descriptor, "wb"); file.truncate(size)"""
    reading = """
        open(path); open(path, "rb"); path.open(); path.open(encoding="utf-8")
        text.replace("a", "b"); zipfile.ZipFile(path); os.open(path, os.O_RDONLY)
        cell.truncate(width, overflow='x'); archive.open(wheel.member); replace(a, b=1)"""
    assert len(list(found(f"class C:\n    def f(self):{reading}", "m"))) == 0
    assert list(found(f"class C:\n    def f(self):{writing}", "m")) == ["m:C.f"] * 14
    statements = [one for line in writing.splitlines() for one in line.split(";") if one.strip()]
    assert [list(found(one.strip(), "m")) for one in statements] == [["m:"]] * 14
