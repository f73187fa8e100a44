"""Tracks whether a cached model is in use and its last use, without files of our own.

A process that opens a model holds a shared lock on its directory until it ends, also in a read-only
cache; removal needs the exclusive lock. The last use is the access time of the weights, set
explicitly since mounts with noatime do not update it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from llmcli.checkpoints.catalog import cache_dir

WEIGHTS = (".gguf", ".safetensors")
_MOST = 1024  # files of one model; a directory may hold anything
_held: dict[Path, int] = {}


def home_of(path: Path) -> Path | None:
    """The cached version's directory that contains `path`; None outside the caches.

    Either `models/NAME-DIGEST` in our cache and `models--ORG--NAME/snapshots/COMMIT` in the hub's.
    """
    ours = Path(os.path.realpath(cache_dir() / "models"))
    absolute = Path(os.path.abspath(path))
    for folder in (absolute, *absolute.parents):
        inside = Path(os.path.realpath(folder.parent))  # same form as in removal
        if inside == ours or (
            inside.name == "snapshots" and inside.parent.name.startswith("models--")
        ):
            return inside / folder.name
    return None


def mark_used(path: Path) -> None:
    """Record that the model at `path` is used now, and lock it until this process ends.

    Never raises; does nothing if the cache is read-only or `path` is outside the caches.
    """
    with contextlib.suppress(OSError, ValueError):
        home = home_of(path)
        if home is None:
            return
        if home not in _held:
            descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _held[home] = descriptor
            with contextlib.suppress(OSError):  # being removed, or no locks on this file system
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        files = [path]
        if path.is_dir():
            files = [path / n for n in os.listdir(path)[:_MOST] if n.lower().endswith(WEIGHTS)]
        for file in files:
            status = os.stat(file)
            if stat.S_ISREG(status.st_mode):
                os.utime(file, ns=(time.time_ns(), status.st_mtime_ns))


@contextlib.contextmanager
def exclusive(paths: tuple[Path, ...]) -> Iterator[Path | None]:
    """Hold exclusive locks on `paths`; yields the first that another process holds, else None.

    Missing paths are skipped. Locks of this process from `mark_used` are released. Raises OSError
    for a path that cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        for path in dict.fromkeys(paths):
            own = _held.pop(path, None)
            if own is not None:
                os.close(own)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield path
                return
            except OSError:  # a file system without locks
                continue
        yield None
