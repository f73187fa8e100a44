"""Bytes on the disk: of files that may have several links, and of whole directories."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmcli.checkpoints.cache.layout import CachedFile
from llmcli.checkpoints.split import part_names


def on_disk(files: Iterable[CachedFile]) -> int:
    """Bytes of the files, each of them counted once however many links it has."""
    return sum({file.key: file.size for file in files if file.key is not None}.values())


def bytes_at(path: Path) -> int:
    """What the model at `path` takes: a file with all its parts, or the files of a directory."""
    found = [path.with_name(name) for name in part_names(path.name) or (path.name,)]
    if path.is_dir():
        found = [one for one, _, _ in regular(path)]
    sizes = {}
    for file in found:
        with contextlib.suppress(OSError):
            status = file.stat()
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def bytes_below(path: Path) -> int:
    """What a file, or all files in a directory, take on the disk; links take nothing."""
    if path.is_symlink():
        return 0
    if path.is_dir():
        return sum(bytes_below(Path(w) / name) for w, _, names in os.walk(path) for name in names)
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def regular(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Path, bytes and last use of every file below `folder`; links are not followed."""
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                yield facts(Path(where) / name)
            except OSError:
                continue


def facts(path: Path) -> tuple[Path, int, float]:
    """Path, bytes (none of a link) and last use of a file. Raises OSError."""
    status = os.lstat(path)
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return path, size, max(status.st_atime, status.st_mtime)
