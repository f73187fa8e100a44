"""Files that the user asked for: their ending, their size, and that they appear whole or not.

Those of views: their sizes are known before the run, and `--open` shows them.
"""

import io
import json
import os
import re
import stat
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import children
import numpy as np
import pytest
from cli_tiny import write_tiny
from gguf_model import write_model as write_gguf
from programs import pipe
from safetensors.numpy import load

from llmcli.decoder.decoder import Decoder
from llmcli.errors import UsageError, WriteFailed
from llmcli.shell import files
from llmcli.shell.files import check_size, kind_of_file, whole_file, written
from llmcli.shell.output import dumps, json_pieces, write_document, write_file
from llmcli.ui.arrays import ArrayPlan, array_writer

ALLOWED = ("safetensors", "npz", "png")


def refused(path):
    with pytest.raises(WriteFailed) as caught:
        kind_of_file(str(path), ALLOWED)
    assert caught.value.message.startswith(f"could not write `{path}`: ")
    return caught.value.message.removeprefix(f"could not write `{path}`: "), caught.value.hint


def test_a_place_that_cannot_be_is_told_before_anything_runs(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "d.png").mkdir()
    (tmp_path / "loop.npz").symlink_to("loop.npz")
    (tmp_path / "dangling.npz").symlink_to("nowhere/a.npz")
    for path, reason in (
        ("n" * 260 + ".npz", "file name too long"), ("n" * 260 + "/a.npz", "file name too long"),
        ("file/a.npz", "not a directory"), ("loop.npz", "too many levels of symbolic links"),
        ("dangling.npz", "there is no such directory"),
    ):  # fmt: skip
        assert refused(tmp_path / path)[0] == reason
    assert refused("~nobody-of-this-name/a.npz")[0] == "there is no such directory"
    assert refused(tmp_path / "n o" / "a.png") == (
        "there is no such directory", f"make it first: mkdir -p '{tmp_path}/n o'",
    )  # fmt: skip
    inside = f"name a file in it, such as `{tmp_path}/d.png/out.png`"
    assert refused(tmp_path / "d.png") == ("it is a directory", inside)
    assert refused(tmp_path / "loop.npz")[1] == files.OTHER_PLACE
    asked = []  # of a folder that is not ours: root may write everywhere
    monkeypatch.setattr(files.os, "access", lambda path, mode: asked.append(path))
    assert refused(tmp_path / "a.png")[0] == "permission denied"
    os.mkfifo(tmp_path / "pipe.png")
    assert refused(tmp_path / "pipe.png")[0] == "permission denied"
    assert asked == [tmp_path, tmp_path / "pipe.png"]


@pytest.fixture
def free(monkeypatch):
    """`free(bytes)`: how large the disk is, and how much of it is free."""

    def has(nbytes):
        disk = SimpleNamespace(total=nbytes, free=nbytes)
        monkeypatch.setattr(files.shutil, "disk_usage", lambda _: disk)

    has(8 << 30)
    return has


@pytest.mark.parametrize(("name", "cap"), [("a.HTML", 64 << 20), ("a.npz", 1 << 30)])
def test_above_the_cap_it_has_to_be_forced(name, cap, tmp_path, free):
    path = str(tmp_path / name)
    check_size(path, cap, force=False, smaller="use less")
    check_size(path, cap + 1, force=True, smaller="use less")
    with pytest.raises(UsageError, match="would take about") as caught:
        check_size(path, 3 * cap, force=False, smaller="use less")
    assert caught.value.hint == "use less, or add --force"


def test_a_disk_without_room_is_told_before_anything_runs(tmp_path, free):
    with pytest.raises(WriteFailed, match=r"about 9 GiB and the disk has 8 GiB free"):
        check_size(str(tmp_path / "a.npz"), 9 << 30, force=True, smaller="use less")
    os.mkfifo(tmp_path / "pipe.npz")  # takes no room on a disk
    check_size(str(tmp_path / "pipe.npz"), 9 << 30, force=True, smaller="use less")
    free(0)  # one that has no size is not full
    check_size(str(tmp_path / "a.npz"), 9000, force=False, smaller="use less")


def test_a_new_file_has_the_usual_permissions_and_an_old_one_keeps_its_own(tmp_path, request):
    """Behind a link it is the file that is replaced."""
    request.addfinalizer(partial(os.umask, os.umask(0o027)))
    new, old, link = (tmp_path / name for name in ("new.png", "old.png", "link.png"))
    old.write_bytes(b"before")
    old.chmod(0o604)
    link.symlink_to("old.png")
    write_file(str(new), b"now")
    write_file(str(link), b"now")
    assert (new.read_bytes(), old.read_bytes(), link.is_symlink()) == (b"now", b"now", True)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    assert stat.S_IMODE(old.stat().st_mode) == 0o604
    assert sorted(os.listdir(tmp_path)) == ["link.png", "new.png", "old.png"]


@pytest.mark.parametrize("exception", [KeyboardInterrupt, ValueError, OSError])
@pytest.mark.parametrize("before", [None, b"old"])
def test_what_is_not_finished_leaves_nothing_and_the_old_file(tmp_path, exception, before):
    path = tmp_path / "a.npz"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(exception), whole_file(str(path)) as file:  # noqa: PT012
        file.write(b"half")
        file.flush()
        assert path.exists() == (before is not None)
        raise exception
    assert os.listdir(tmp_path) == ([] if before is None else ["a.npz"])
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_power_loss_leaves_no_half_file_under_the_name(tmp_path, monkeypatch, before):
    path, synced, real = tmp_path / "a.npz", [], os.fsync
    if before is not None:
        path.write_bytes(before)

    def sync(descriptor):
        real(descriptor)
        what = os.fstat(descriptor)
        folder = stat.S_ISDIR(what.st_mode)
        synced.append((folder, what.st_ino, path.read_bytes() if path.exists() else None))

    monkeypatch.setattr(os, "fsync", sync)
    write_file(str(path), b"new")
    # all of the file before the name leads to it, then the name
    assert synced == [
        (False, path.stat().st_ino, before),
        (True, tmp_path.stat().st_ino, b"new"),
    ]


def test_a_write_protected_file_stays(tmp_path):
    """Only its directory's permissions decide about a rename, and root may write anything."""
    path = tmp_path / "kept.png"
    path.write_bytes(b"old")
    path.chmod(0o444)
    assert refused(path) == ("it is write-protected", files.OTHER_PLACE)
    with pytest.raises(WriteFailed, match="write-protected"):
        write_file(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["kept.png"]


# `dump` writes arrays, the others documents and pictures: each names a file that it can write
OVERWRITING = [
    line.split() for line in Path(__file__).with_name("overwriting.txt").read_text().splitlines()
]


@pytest.mark.parametrize("argv", OVERWRITING, ids=lambda argv: f"{argv[0]}-{argv[-1]}")
def test_no_file_of_the_model_is_overwritten(cli, tmp_path, monkeypatch, argv):
    folder = write_tiny(tmp_path / "m", weights=True)
    (folder / "tokenizer_config.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.chdir(folder)
    (tmp_path / "m" / "link.safetensors").symlink_to("model.safetensors")
    (tmp_path / "m" / "link.json").symlink_to("config.json")
    os.link("model.safetensors", "hard.npz")
    result = cli(*argv, "-m", ".", "--dtype", "float32", "-q")
    reason = "it is a file of the model that is being read"
    assert result.err.splitlines() == [
        f"error: could not write `{argv[-1]}`: {reason}",
        f"hint: {files.OTHER_PLACE}",
    ]
    assert (result.code, result.out) == (1, "")
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_no_part_of_a_split_model_is_overwritten_but_what_lies_beside_it(cli, tmp_path):
    parts = write_gguf(tmp_path / "m.gguf", parts=3)
    for number, part in enumerate(parts):
        before, out = part.read_bytes(), tmp_path / f"out{number}.npz"
        out.symlink_to(part)
        result = cli("dump", "-m", parts[0], "--name", "embed.W", "-o", out)
        assert result.code == 1
        assert "it is a file of the model that is being read" in result.err
        assert part.read_bytes() == before
    out = tmp_path / "out.npz"
    out.write_bytes(b"old")
    assert cli("dump", "-m", parts[0], "--name", "embed.W", "-o", out).code == 0
    assert np.load(out)["embed.W"].size


WRITER = """
import sys
from llmcli.shell.files import whole_file
with whole_file(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("begun", flush=True)
    sys.stdin.read()
"""


def test_the_partial_file_of_a_killed_process_is_removed_by_the_next_write(tmp_path):
    (program := tmp_path.parent / "writer.py").write_text(WRITER)
    argv = [sys.executable, str(program), str(tmp_path / "a.npz")]
    with children.start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begun\n"
        (partial,) = os.listdir(tmp_path)
        write_file(str(tmp_path / "b.npz"), b"whole")
        assert sorted(os.listdir(tmp_path)) == [partial, "b.npz"], "its writer lives"
        process.kill()
    assert partial in os.listdir(tmp_path)
    (tmp_path / ".llmcli-mine.part").write_bytes(b"")  # the names of others
    (tmp_path / ".llmcli-0123456789ab.part").symlink_to("b.npz")
    write_file(str(tmp_path / "c.npz"), b"whole")
    kept = [".llmcli-0123456789ab.part", ".llmcli-mine.part", "b.npz", "c.npz"]
    assert sorted(os.listdir(tmp_path)) == kept
    assert (tmp_path / "b.npz").read_bytes() == b"whole"


def test_a_partial_file_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, removed = files.fcntl.flock, []

    def late(descriptor, kind):
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        lock(descriptor, kind)

    monkeypatch.setattr(files.fcntl, "flock", late)
    write_file(str(tmp_path / "a.npz"), b"whole")
    assert len(removed) == 1
    assert os.listdir(tmp_path) == ["a.npz"]


def test_a_pipe_gets_all_of_a_file_or_nothing(tmp_path):
    path = tmp_path / "pipe.json"
    with pipe(path) as reading:
        write_file(str(path), b"through")
        assert os.read(reading, 100) == b"through"
        with pytest.raises(ValueError), whole_file(str(path)) as file:  # noqa: PT011, PT012
            file.write(b"half")
            raise ValueError
        assert os.read(reading, 100) == b""


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_a_pipe_gets_arrays_too_though_their_header_is_written_last(kind, tmp_path):
    path = tmp_path / f"pipe.{kind}"
    numbers = np.arange(6, dtype=np.float32)
    with pipe(path) as reading:
        with whole_file(str(path)) as file:
            writer = array_writer(kind, file, [ArrayPlan("a", "float32", (6,))], {})
            writer.write("a", numbers)
            writer.finish({})
        data = os.read(reading, 1 << 16)
    found = load(data) if kind == "safetensors" else np.load(io.BytesIO(data))
    assert np.array_equal(found["a"], numbers)


def test_a_document_is_the_json_of_dumps_with_arrays_row_by_row(tmp_path):
    floats = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    floats[0, 0] = [np.nan, -np.inf, 0.0, 1e-30]
    document = {
        "schema": "x/1", "empty": [{}, [], np.zeros((2, 0))], "tokens": [(1, 'é"\n')],
        "pattern": floats, "ids": np.arange(3), "wide": np.array([1 / 3, np.inf]), "none": None,
    }  # fmt: skip
    path = tmp_path / "a.json"
    write_document(str(path), document)
    found, expected = json.loads(path.read_text(encoding="utf-8")), json.loads(dumps(document))
    back = np.array(found.pop("pattern"), object)
    assert back[0, 0].tolist()[:3] == [None, None, 0]
    back[0, 0, :2] = np.nan, -np.inf
    assert np.array_equal(back.astype(np.float32), floats, equal_nan=True)
    expected.pop("pattern")
    assert found == expected
    rows = list(json_pieces(np.zeros((50, 3), np.float32)))
    assert rows.count("[0, 0, 0]") == 50


def test_what_is_said_of_a_file_has_its_size(tmp_path):
    file = tmp_path / "a.npz"
    file.write_bytes(bytes(1229))
    assert written(str(file), "x [1 2]") == f"wrote `{file}` (1.2 KiB): x [1 2]"
    assert written(os.devnull, "x [1 2]") == f"wrote `{os.devnull}`: x [1 2]"


# files of views

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
CUT = {
    "attention": "name fewer layers and heads with --layer and --head",
    "dump": "name fewer tensors with --name",
    "diff": "use a shorter text",
    "lens": "choose fewer positions with `--position` or layers with `--layer`",
    "experts": "choose fewer positions with `--position` or layers with `--layer`",
}
DUMPED = ["hello world", "--name", "embed,blocks.*,ln_final*,logits*,cache.*", "--generate", "4"]
PROGRAM = "def f(x):\n    return [x ** 2 for x in range(10)]"
# what is written, into which kinds of files, and how near its size is to what was said
WRITTEN = [
    (["attention", "-m", "MODEL", "the cat sat on the mat " * 5], "safetensors npz html", 0.1),
    (["attention", "-m", "MODEL", "the cat sat on the mat " * 5], "json", 0.15),
    (["dump", "-m", "MODEL", *DUMPED], "safetensors npz", 0.1),
    (["lens", "-m", "tiny", "The capital of France is"], "json html", 0.1),
    (["lens", "-m", "tiny", "-k", "1", "--position", ":20"], "json html", 0.1),
    (["lens", "-m", "tiny", "-k", "20", "--position", "-6:", PROGRAM], "json html", 0.1),
    (["lens", "-m", "tiny", "--mid", "--target", "next", "Hello"], "json html", 0.1),
    (["diff", "-m", "tiny", "--dtype", "bfloat16", PROGRAM], "json html", 0.1),
    (["diff", "-m", "tiny", "--dtype", "bfloat16", "--weights"], "json", 0.2),
    (["experts", "-m", "MIXTURE", "--random-weights", "some words, " * 25], "json", 0.25),
    (["experts", "-m", "MIXTURE", "--random-weights", "some words, " * 25], "html", 0.1),
]  # fmt: skip


@pytest.fixture
def view(cli, weighted, mixture, monkeypatch):
    """A command whose words for models stand for these."""
    monkeypatch.setattr("sys.stdin", None)
    models = {"MODEL": weighted, "MIXTURE": mixture}
    return lambda *argv: cli(*(models.get(word, word) for word in argv))


def small_files_only(patch):
    """And a model that is run fails."""
    patch.setattr("llmcli.shell.files.FILE_CAP", 1000)
    patch.setattr("llmcli.shell.files.PAGE_CAP", 1000)
    patch.setattr(Decoder, "__call__", pytest.fail)


@pytest.mark.parametrize(
    ("argv", "kind", "near"),
    [(argv, kind, near) for argv, kinds, near in WRITTEN for kind in kinds.split()],
)
def test_a_size_is_said_before_the_run_and_above_the_cap_it_has_to_be_forced(
    view, monkeypatch, tmp_path, argv, kind, near
):
    file = tmp_path / f"a.{kind}"
    run = Decoder.__call__
    small_files_only(monkeypatch)
    refused = view(*argv, "-o", str(file))
    assert (refused.code, refused.out) == (2, "")
    said = rf"`{re.escape(str(file))}` would take about ([\d.]+) (\w+), more than 1000 B\n"
    number, unit = re.search(said, refused.err).groups()
    assert f"hint: {CUT[argv[0]]}, or add --force\n" in refused.err
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(Decoder, "__call__", run)
    assert view(*argv, "-o", str(file), "--force").code == 0
    assert file.stat().st_size == pytest.approx(float(number) * UNITS[unit], rel=near)


def test_matrices_in_a_document_have_a_size_too(view, monkeypatch):
    small_files_only(monkeypatch)
    result = view("attention", "-m", "MODEL", "abcabcab", "--json", "--patterns")
    assert result.code == 2
    error = result.json()["error"]
    assert re.fullmatch(r"the document would take about .*, more than 1000 B", error["message"])
    assert "--force" in error["hint"]


@pytest.mark.parametrize(("argv", "held"), [
    ("lens -m MODEL", "3 rows at 5 positions"),
    ("experts -m MIXTURE --random-weights", "the choices at 5 positions"),
], ids=["lens", "experts"])  # fmt: skip
def test_files_have_what_is_shown(view, tmp_path, argv, held):
    command, *of = argv.split()

    def written(kind):
        file = tmp_path / f"out.{kind}"
        result = view(command, "hello", *of, "-o", str(file))
        size = f"{file.stat().st_size / 1024:.3g} KiB"
        assert result.code == 0
        assert result.err == f"note: wrote `{file}` ({size}): {held}\n"
        return file.read_bytes()

    shown = view(command, "hello", *of, "--json").json()
    document, png, page = json.loads(written("json")), written("png"), written("html").decode()
    assert png.startswith(b"\x89PNG")
    assert min(struct.unpack(">II", png[16:24])) > 100
    assert page.startswith("<!doctype html>")
    if command == "experts":
        assert document == shown
        return
    assert {**document, "environment": 0, "rows": 0} == {**shown, "environment": 0, "rows": 0}
    assert len(document["rows"][0]["cells"]) == 5
    assert "blocks.1.resid_post" in page


# what is opened


@pytest.fixture
def opened(monkeypatch):
    """The desktop's opener, which opens nothing and ends with 0."""
    monkeypatch.setattr(files, "launch", launch := Mock(return_value=0))
    return launch


VIEWS = [
    ["attention", "-m", "MODEL", "abcabcab", "--layer", "0", "--head", "1"],
    ["lens", "-m", "MODEL", "hello"],
    ["experts", "-m", "MIXTURE", "--random-weights", "hello"],
]


@pytest.mark.parametrize("argv", VIEWS, ids=lambda argv: argv[0])
def test_a_page_is_made_and_opened_or_the_file_that_is_written(
    view, opened, monkeypatch, tmp_path, argv
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shown = view(*argv).out
    result = view(*argv, "--open")
    assert (result.code, result.out) == (0, shown)
    (page,) = tmp_path.glob(f"llmcli-{argv[0]}-*/{argv[0]}.html")
    assert opened.mock_calls == [call(str(page))]
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    assert f"note: wrote `{page}`" in result.err
    assert page.parent.stat().st_mode & 0o077 == 0  # for nobody else
    for kind in ("html", "png"):
        file = tmp_path / f"a.{kind}"
        assert view(*argv, "-o", str(file), "--open", "--json").json()["ok"]
        assert opened.mock_calls[-1] == call(str(file))
        assert file.stat().st_size > 1000
    refused = view(*argv, "-o", str(tmp_path / "a.json"), "--open")
    assert refused.code == 2
    assert "`--open` shows .html and .png files" in refused.err
    assert opened.call_count == 3
    opened.return_value = 3
    for kind, viewer in (("html", "browser"), ("png", "image viewer")):
        file = tmp_path / f"b.{kind}"
        result = view(*argv, "-o", str(file), "--open")
        assert result.code == 0
        assert re.search(r"^✓ \d checks", result.out, re.MULTILINE)
        assert f"note: wrote `{file}` " in result.err
        assert f"note: no {viewer} could be started: `{file}` is written, open it" in result.err
        assert file.exists()


@pytest.mark.parametrize(("script", "opens"), [
    ("echo 'links: not found' >&2; exit 3", False), ("sleep 3", True), (None, False),
])
def test_an_opener_that_opens_nothing_or_is_not_there_is_noticed(
    view, monkeypatch, tmp_path, script, opens
):
    """And one that goes on is the browser itself."""
    program = tmp_path / ("open" if sys.platform == "darwin" else "xdg-open")
    if script is not None:
        program.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path / "log"}\n{script}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    monkeypatch.setattr(files, "OPENING_S", 0.5 if script == "sleep 3" else 30.0)
    monkeypatch.chdir(tmp_path)
    result = view(*VIEWS[0], "-o", "a.png", "--open")
    assert result.code == 0
    assert ("note: no image viewer could be started" in result.err) == (not opens)
    assert script is None or (tmp_path / "log").read_text() == f"{tmp_path / 'a.png'}\n"


def test_a_run_that_fails_leaves_no_directory(view, opened, monkeypatch, tmp_path):
    ended = []
    (tmp_path / "pages").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "pages"))
    monkeypatch.setattr("atexit.register", ended.append)
    small_files_only(monkeypatch)
    result = view(*VIEWS[0], "--open")
    assert result.code == 2
    assert "--force" in result.err
    (end,) = ended
    end()
    assert not list((tmp_path / "pages").iterdir())
    assert not opened.called
