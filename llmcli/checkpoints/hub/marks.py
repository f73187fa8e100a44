"""Marks of fetched files that are not verified yet, stored beside the snapshots.

The library renames a complete file before its digest is compared here; a kill in between would
leave an unverified file. The mark is created before the file and removed after verification. Files
of other programs in the shared cache have no mark and are trusted, as they trust ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from llmcli.checkpoints.files import sync

_FOLDER = ".llmcli-unverified"  # in the repository's directory; other tools ignore it
_ENDING = ".mark"


# git's id of the empty file, the name of its blob in the cache
_EMPTY = hashlib.sha1(b"blob 0\0", usedforsecurity=False).hexdigest()


def emptied(path: Path) -> bool:
    """Whether a file is empty that has bytes on the hub, as after a power loss."""
    try:
        return path.stat().st_size == 0 and path.resolve().name != _EMPTY
    except OSError:
        return False


@contextlib.contextmanager
def marked(snapshot: Path, name: str) -> Iterator[None]:
    """Mark the file `name` of `snapshot` as unverified inside the context.

    The mark stays after an error or a kill, unless the file is missing. Raises OSError if the cache
    is not writable.
    """
    folder = _of(snapshot)
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / (quote(name, safe="") + _ENDING)
    mark.touch()
    whole = False
    try:
        yield
        sync(snapshot / name)  # before the mark is removed
        whole = True
    finally:
        if whole or not os.path.lexists(snapshot / name):
            with contextlib.suppress(OSError):  # another process may have removed it
                mark.unlink()
                folder.rmdir()
                folder.parent.rmdir()


def unverified(snapshot: Path) -> frozenset[str]:
    """Names of the marked files of `snapshot`, existing or not."""
    try:
        marks = os.listdir(_of(snapshot))
    except OSError:
        return frozenset()
    return frozenset(unquote(mark.removesuffix(_ENDING)) for mark in marks)


def absent(snapshot: Path) -> frozenset[str]:
    """Files recorded by the library as missing at this commit."""
    try:
        return frozenset(os.listdir(snapshot.parents[1] / ".no_exist" / snapshot.name))
    except OSError:
        return frozenset()


def _of(snapshot: Path) -> Path:
    return snapshot.parents[1] / _FOLDER / snapshot.name
