"""Files of views: their sizes are known before the run, and `--open` shows them."""

import json
import re
import struct
import sys

import pytest

import llmcli.shell.files
from llmcli.decoder.decoder import Decoder

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
CUT = {
    "attention": "name fewer layers and heads with --layer and --head",
    "dump": "name fewer tensors with --name",
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
    (["experts", "-m", "MIXTURE", "--random-weights", "some words, " * 70], "json html", 0.3),
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
    """The files that were opened, by nothing; `.code` is what the desktop's opener ends with."""

    class Opened(list):
        code = 0

        def launch(self, path):
            self.append(path)
            return self.code

    opened = Opened()
    monkeypatch.setattr(llmcli.shell.files, "launch", opened.launch)
    return opened


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
    assert opened == [str(page)]
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    assert f"note: wrote `{page}`" in result.err
    assert page.parent.stat().st_mode & 0o077 == 0  # for nobody else
    for kind in ("html", "png"):
        file = tmp_path / f"a.{kind}"
        assert view(*argv, "-o", str(file), "--open", "--json").json()["ok"]
        assert opened[-1] == str(file)
        assert file.stat().st_size > 1000
    refused = view(*argv, "-o", str(tmp_path / "a.json"), "--open")
    assert refused.code == 2
    assert "`--open` shows .html and .png files" in refused.err
    assert len(opened) == 3
    opened.code = 3
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
    monkeypatch.setattr(llmcli.shell.files, "OPENING_S", 0.5 if script == "sleep 3" else 30.0)
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
    assert opened == []
