"""Files that were fetched and are not verified yet: a mark beside the snapshots for each of them.

The library gives a file its name once it is whole, and we compare its digest after that: who is
killed between the two leaves a file that looks like any other. The mark was there before it, and
goes when the digest was right. What other programs put into the cache they all share has no
mark: it is taken as it is, as they take what we put there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from llmcli.checkpoints.files import sync

_FOLDER = ".llmcli-unverified"  # in the repository's directory, where tools ignore what is no part
_ENDING = ".mark"


# the name that git gives the empty file, which becomes that of its bytes in the cache
_EMPTY = hashlib.sha1(b"blob 0\0", usedforsecurity=False).hexdigest()


def emptied(path: Path) -> bool:
    """Whether a file is empty that was not so on the hub: what a power loss leaves."""
    try:
        return path.stat().st_size == 0 and path.resolve().name != _EMPTY
    except OSError:
        return False


@contextlib.contextmanager
def marked(snapshot: Path, name: str) -> Iterator[None]:
    """Inside, the file `name` of `snapshot` counts as not verified; after an error or a kill
    too, unless it is not there. Raises OSError where the cache cannot be written.
    """
    folder = _of(snapshot)
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / (quote(name, safe="") + _ENDING)
    mark.touch()
    whole = False
    try:
        yield
        sync(snapshot / name)  # the bytes before the mark goes, also where the power fails
        whole = True
    finally:
        if whole or not os.path.lexists(snapshot / name):
            with contextlib.suppress(OSError):  # another process may have verified it, too
                mark.unlink()
                folder.rmdir()
                folder.parent.rmdir()


def unverified(snapshot: Path) -> frozenset[str]:
    """Names of the files of `snapshot` that have a mark, whether they are there or not."""
    try:
        marks = os.listdir(_of(snapshot))
    except OSError:
        return frozenset()
    return frozenset(unquote(mark.removesuffix(_ENDING)) for mark in marks)


def absent(snapshot: Path) -> frozenset[str]:
    """What the repository does not have at that commit, as far as the library has noted it."""
    try:
        return frozenset(os.listdir(snapshot.parents[1] / ".no_exist" / snapshot.name))
    except OSError:
        return frozenset()


def _of(snapshot: Path) -> Path:
    return snapshot.parents[1] / _FOLDER / snapshot.name
