"""Finds unneeded files in both caches: stale partial downloads and replaced versions.

In our cache: temporary files of interrupted fetches, and file versions no longer in the catalog. In
the hub cache (models only): partial downloads, blobs without a snapshot, commits that their branch
has moved on from, barely begun downloads, and empty repositories.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from llmcli.checkpoints.cache.hub import CachedRepository, files_of
from llmcli.checkpoints.cache.inventory import Inventory, Stored, name_of, pinned
from llmcli.checkpoints.cache.removal import (
    Part,
    Piece,
    chosen,
    is_locked,
    of_hub,
    of_own,
    unlinked,
    whole_repository,
)
from llmcli.checkpoints.catalog import CATALOG
from llmcli.checkpoints.fetch import SCRATCH
from llmcli.checkpoints.hub.files import SMALL
from llmcli.records.models import ago

_VERSION = re.compile(r"(?P<name>.+)-[0-9a-f]{12}")
_UNLOCKED_S = 3600.0  # age of a stale partial download without a lock file


def left_over(inventory: Inventory, unused_since: float | None = None) -> list[Piece]:
    """List unneeded pieces; with `unused_since` also models last used before that time.

    The time is in seconds since 1970. Models that ship with llmcli are excluded.
    """
    pieces = list(_of_own_cache(inventory))
    parts: dict[tuple[Path, ...], Part] = {}
    for repository in inventory.repositories:
        pieces += _of_repository(repository)
        for part in _needless(repository):
            parts[_paths(part)] = part
    if unused_since is not None:
        for stored, reason in _unused(inventory, unused_since):
            found = chosen(stored, inventory, reason)
            if isinstance(found, Part):
                parts.setdefault(_paths(found), found)
            else:
                pieces.append(found)
    return pieces + of_hub(list(parts.values()))


def _paths(part: Part) -> tuple[Path, ...]:
    return (part.revision.snapshot_path, *(file.file_path for file in part.files.values()))


def _unused(inventory: Inventory, before: float) -> Iterator[tuple[Stored, str]]:
    for stored in inventory.stored():
        used = stored.model.last_used
        if used is not None and used < before and stored.model.place != "nowhere":
            yield stored, f"last used {ago(time.time() - used)}"


def _of_own_cache(inventory: Inventory) -> Iterator[Piece]:
    current = {entry.file.parent.name: entry for entry in CATALOG.values() if entry.file}
    try:
        folders = sorted(path for path in inventory.own.iterdir() if not path.is_symlink())
    except OSError:
        return
    for folder in folders:
        entry, version = current.get(folder.name), _VERSION.fullmatch(folder.name)
        if not folder.is_dir() or version is None:
            continue  # not created by a fetch
        if entry is None:
            reason = "a version no longer in the catalog"
            yield of_own(folder, version["name"], reason, [folder])
        elif scratch := sorted(folder.glob(SCRATCH + "*")):
            reason = "left by an interrupted fetch"
            yield of_own(folder, entry.name, reason, scratch)


def _needless(repository: CachedRepository) -> Iterator[Part]:
    """Replaced commits, and commits whose download has just begun.

    If no commit has a branch, all were fetched by commit, as the catalog does.
    """
    branches = any(revision.refs for revision in repository.revisions)
    some = any(revision.files for revision in repository.revisions)
    for revision in repository.revisions:
        reason, rests = "", _at_rest(revision.snapshot_path)
        if not revision.files:
            reason = "an empty snapshot" if some and rests else ""
        elif not revision.refs and not pinned(repository, revision):
            if branches:
                reason = "a branch has moved on from this commit"
            elif rests and all(name in SMALL for name in files_of(revision)):
                reason = "small files without weights"
        if reason:
            yield Part(
                name=name_of(repository, revision),
                why=reason,
                repository=repository,
                revision=revision,
                files=files_of(revision),
            )


def _of_repository(repository: CachedRepository) -> Iterator[Piece]:
    if repository.problem or repository.path.is_symlink():
        return
    if not any(revision.files for revision in repository.revisions) and _at_rest(repository.path):
        yield whole_repository(repository, "a repository with no model in it")
        return
    linked = {file.blob_path for revision in repository.revisions for file in revision.files}
    try:
        blobs = sorted(set((repository.path / "blobs").iterdir()) - linked)
    except OSError:
        return
    partial = [blob for blob in blobs if blob.name.endswith(".incomplete")]
    for reason, paths in (
        ("a stale partial download", [half for half in partial if _ended(half, repository)]),
        ("no snapshot links to it", [b for b in blobs if b not in partial and _at_rest(b)]),
    ):
        if paths:
            yield unlinked(repository, reason, paths)


def _ended(partial: Path, repository: CachedRepository) -> bool:
    """Whether no process writes it: its lock file is free, or it has none and is old."""
    lock = repository.locks / f"{partial.name.split('.')[0]}.lock"
    return not is_locked(lock) if lock.exists() else _at_rest(partial)


def _at_rest(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > _UNLOCKED_S
    except OSError:
        return False
