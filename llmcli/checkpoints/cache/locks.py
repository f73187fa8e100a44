"""Whether a model in a cache is in use, and when it was last: kept without a file of our own.

Whoever opens a model holds a shared lock on its directory until the process ends, which works in
a cache that cannot be written too; removing it needs the exclusive one. The last use is
the access time of its weights, set by hand: file systems are mounted so that reading does not.
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
_MOST = 1024  # files of one model, for a directory may hold anything
_held: dict[Path, int] = {}


def home_of(path: Path) -> Path | None:
    """The directory of a cache that `path` is or lies in: one version of one model, or None.

    That is `models/NAME-DIGEST` in our cache and `models--ORG--NAME/snapshots/COMMIT` in the hub's.
    """
    ours = Path(os.path.realpath(cache_dir() / "models"))
    absolute = Path(os.path.abspath(path))
    for folder in (absolute, *absolute.parents):
        inside = Path(os.path.realpath(folder.parent))  # as removal names it
        if inside == ours or (
            inside.name == "snapshots" and inside.parent.name.startswith("models--")
        ):
            return inside / folder.name
    return None


def mark_used(path: Path) -> None:
    """Note that the model at `path` is used now, and hold it until this process ends.

    Never raises: where the cache cannot be written, or `path` is in none, nothing is noted.
    """
    with contextlib.suppress(OSError, ValueError):
        home = home_of(path)
        if home is None:
            return
        if home not in _held:
            descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _held[home] = descriptor
            with contextlib.suppress(OSError):  # being removed, or a file system without locks
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
    """Hold exclusive locks on files or directories; the first that others hold, else None.

    A missing path is not held. This process lets go of what it marked as used itself.
    Raises OSError for one that may not be opened.
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
            except OSError:  # a file system without locks: no lock can be held there
                continue
        yield None
