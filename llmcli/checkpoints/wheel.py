"""Downloads one wheel with pip or uv, whichever the user has, under the user's own settings."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from llmcli.checkpoints.files import shown
from llmcli.errors import NetworkError, WriteFailed

_POLL = 0.1  # seconds between two looks at how much has arrived
_OTHERWISE = "or fetch a .gguf file yourself and name it with `-m FILE.gguf`"
_UNREACHABLE = ("connection broken by", "Max retries exceeded", "error sending request")
_FULL = ("No space left on device", "Disk quota exceeded")


def download_command(requirement: str, folder: Path) -> list[str]:
    """The command that puts the wheel of `requirement` into `folder`, without dependencies.

    This interpreter's pip, else `pip` or `uv` on the PATH (uv has no download: it unpacks the
    wheel there). Wheels only: a source distribution would run code. NetworkError without any.
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

    `progress` is told the bytes that have arrived. Everything temporary stays in `scratch`.
    Raises NetworkError with the tool's own last word, WriteFailed where the disk is full; when
    interrupted, stops the tool first.
    """
    folder, log = scratch / "wheel", scratch / "log"
    command = download_command(requirement, folder)
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}  # so that what is left over is ours
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
    """What to say after pip (or uv) failed: the disk, the network, or its own last word."""
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
