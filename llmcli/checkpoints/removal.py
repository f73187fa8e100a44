"""Removes models and what is left over from both caches: huggingface_hub plans and deletes.

Checked here in addition: whether the plan is still the listed one, whether real directories (no
links) lead to the files from the cache, and whether they are gone afterwards. Every path comes from
a listing of the cache, never from user input or file contents.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.checkpoints.cache import (
    CachedRepository,
    Inventory,
    Stored,
    files_of,
    name_of,
    pinned,
    sizes,
    stored_as,
)
from llmcli.checkpoints.catalog import CATALOG
from llmcli.checkpoints.fetch import SCRATCH
from llmcli.checkpoints.files import shown, why
from llmcli.checkpoints.hub.library import lengthened
from llmcli.checkpoints.hub.listing import SMALL, WEIGHTS
from llmcli.checkpoints.names import HubId, parse, typed
from llmcli.checkpoints.split import part_names
from llmcli.errors import ModelNotFound, UsageError, WriteFailed
from llmcli.records.models import Place, Removal, ago
from llmcli.records.numbers import did_you_mean

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo, DeleteCacheStrategy

_VERSION = re.compile(r"(?P<name>.+)-[0-9a-f]{12}")
_AT_REST_S = 3600.0  # age of what no process writes any more


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Files removed together, by the library's `strategy` for the cache `strategy.cache_dir`."""

    removal: Removal
    strategy: DeleteCacheStrategy

    @property
    def deleted(self) -> tuple[Path, ...]:
        """All deleted paths."""
        plan = self.strategy
        return (*plan.repos, *plan.snapshots, *plan.files, *plan.refs, *plan.blobs)


# `models rm`


def pieces_of(
    names: Sequence[str], inventory: Inventory, revision: str | None = None
) -> list[Piece]:
    """The pieces to remove for `names`, which have the form of `-m`; duplicates are merged.

    `revision` applies to all names; None: the name's own or the default branch. Raises UsageError
    for a model outside the caches, ModelNotFound for one that is not on this machine.
    """
    found = [_named(name, inventory, revision) for name in dict.fromkeys(names)]
    return list(_pieces(found, inventory))


def _named(name: str, inventory: Inventory, revision: str | None) -> Stored:
    for stored in inventory.stored() if revision is None else ():
        if stored.model.name == name:
            if stored.model.place == "package":
                raise UsageError(
                    f"`{name}` ships with llmcli and cannot be removed by itself",
                    hint="`llmcli models list` shows what can",
                )
            if stored.model.place == "nowhere":
                raise _not_here(name, inventory, revision)
            return stored
    found = parse(name, revision=revision)
    if isinstance(found, Path):
        raise UsageError(
            f"`{shown(name)}` is a path, and `models rm` removes what is in the caches",
            hint="remove the file itself, or name a model of `llmcli models list`",
        )
    part = _of_id(name, found, inventory) if isinstance(found, HubId) else None
    if part is None:
        raise _not_here(name, inventory, revision)
    return part


def _of_id(name: str, hub: HubId, inventory: Inventory) -> Stored | None:
    """The model of an id that the list shows differently: a branch, a commit, all GGUF files."""
    wanted = hub.revision or "main"
    for repository in inventory.repositories:
        if repository.name != hub.repository:
            continue
        commit = lengthened(wanted, [one.commit_hash for one in repository.revisions])
        for revision in repository.revisions:
            if wanted not in revision.refs and commit != revision.commit_hash:
                continue
            files = files_of(revision)
            if hub.file is not None:
                parts = part_names(hub.file) or (hub.file,)
                files = {part: files[part] for part in parts if part in files}
            if files:
                return stored_as(name, repository, revision, files)
    return None


def _not_here(name: str, inventory: Inventory, revision: str | None) -> ModelNotFound:
    here = [s.model.name for s in inventory.stored() if s.model.place != "nowhere"]
    near = difflib.get_close_matches(name, here, n=1)
    hint = "`llmcli models list` shows what is"
    if revision is not None and name in here:
        message = f"revision `{shown(revision)}` of `{shown(name)}` is not on this machine"
        return ModelNotFound(message, hint=hint)
    if near and name not in CATALOG:
        hint = did_you_mean([shown(near[0], 200)])
    return ModelNotFound(f"`{typed(name, revision)}` is not on this machine", hint=hint)


# `models prune`


def left_over(inventory: Inventory, unused_since: float | None = None) -> list[Piece]:
    """List unneeded pieces; with `unused_since` also models last used before that time.

    In our cache: temporary files of interrupted fetches, and file versions no longer in the
    catalog. In the hub cache (models only): partial downloads, blobs without a snapshot, commits
    that their branch has moved on from, barely begun downloads, and empty repositories. The time is
    in seconds since 1970. Models that ship with llmcli are excluded.
    """
    pieces = list(_of_own_cache(inventory))
    parts: dict[tuple[Path, ...], Stored] = {}
    for repository in inventory.repositories:
        pieces += _of_repository(repository)
        parts |= {_paths(one): one for one in _needless(repository)}
    for stored in inventory.stored():
        used = stored.model.last_used
        if used is not None and used < (unused_since or 0):
            reason = f"last used {ago(time.time() - used)}"
            parts.setdefault(_paths(stored), replace(stored, why=reason))
    return [*pieces, *_pieces(parts.values(), inventory)]


def _paths(stored: Stored) -> tuple[Path, ...]:
    if stored.revision is None:
        return (Path(str(stored.model.path)),)
    files = (file.file_path for file in stored.files.values())
    return (stored.revision.snapshot_path, *files)


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
        reason, paths = "a version no longer in the catalog", [folder]
        if entry is not None:
            reason = "left by an interrupted fetch"
            scratch = sorted(folder.glob(SCRATCH + "*"))
            paths = [path for path in scratch if _at_rest(path, *path.rglob("*"))]
        if paths:
            name = version["name"] if entry is None else entry.name
            yield _paths_of(name, "llmcli cache", reason, inventory.own, repos=paths)


def _needless(repository: CachedRepository) -> Iterator[Stored]:
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
            found = stored_as(
                name_of(repository, revision), repository, revision, files_of(revision)
            )
            yield replace(found, why=reason)


def _of_repository(repository: CachedRepository) -> Iterator[Piece]:
    name, path = repository.name, repository.path
    if repository.problem or path.is_symlink():
        return
    if not any(revision.files for revision in repository.revisions):
        if _at_rest(path):
            reason = "a repository with no model in it"
            yield _paths_of(name, "hub cache", reason, path.parent, repos=[path])
        return
    linked = {file.blob_path for revision in repository.revisions for file in revision.files}
    try:
        blobs = sorted(set((path / "blobs").iterdir()) - linked)
    except OSError:
        return
    resting = [blob for blob in blobs if _at_rest(blob)]
    partial = [blob for blob in resting if blob.name.endswith(".incomplete")]
    for reason, found in (
        ("a stale partial download", partial),
        ("no snapshot links to it", [blob for blob in resting if blob not in partial]),
    ):
        if found:
            yield _paths_of(name, "hub cache", reason, path.parent, blobs=found)


def _at_rest(*paths: Path) -> bool:
    try:
        return time.time() - max(path.lstat().st_mtime for path in paths) > _AT_REST_S
    except OSError:
        return False


# pieces


def _pieces(found: Iterable[Stored], inventory: Inventory) -> Iterator[Piece]:
    """One piece per model, in order: what the library deletes after the models before it.

    Shared files go with the last model that needs them. Small files without remaining weights go
    too.
    """
    from huggingface_hub import HFCacheInfo

    left: dict[Path, frozenset[CachedRevisionInfo]] = {}
    for one in found:
        name, repository = one.model.name, one.repository
        if repository is None:  # in our cache
            folder = inventory.own / Path(str(one.model.path)).parent.name
            yield _paths_of(name, "llmcli cache", one.why, inventory.own, repos=[folder])
            continue
        scanned, path = repository.scanned, repository.path
        if one.revision is None or scanned is None:  # unreadable, or without files
            yield _paths_of(name, "hub cache", one.why, path.parent, repos=[path])
            continue
        snapshot = one.revision.snapshot_path
        revisions = left.get(path, scanned.revisions)
        revision = next((each for each in revisions if each.snapshot_path == snapshot), None)
        if revision is None:
            continue  # already removed with another model
        gone = {file.file_path for file in one.files.values()}
        rest = frozenset(file for file in revision.files if file.file_path not in gone)
        info = HFCacheInfo(
            size_on_disk=0,
            repos=frozenset([replace(scanned, revisions=revisions)]),
            incomplete_files=frozenset(),
            warnings=[],
            cache_dir=path.parent,
        )
        left[path] = revisions - {revision}
        if any(file.file_path.name.lower().endswith(WEIGHTS) for file in rest):
            left[path] |= {replace(revision, files=rest)}
            strategy = info.delete_files(*(revision.files - rest))
            yield _piece(name, "hub cache", one.why, strategy)
        else:
            strategy = info.delete_revisions(revision.commit_hash)
            yield _piece(name, "hub cache", one.why, strategy, snapshot)


def _paths_of(
    name: str,
    place: Place,
    reason: str,
    root: Path,
    *,
    repos: Sequence[Path] = (),
    blobs: Sequence[Path] = (),
) -> Piece:
    """A piece of paths that a scan does not list, in the cache `root`."""
    from huggingface_hub import DeleteCacheStrategy

    strategy = DeleteCacheStrategy(
        expected_freed_size=sum(size for path in (*repos, *blobs) for size, _ in sizes(path)),
        repos=frozenset(repos),
        blobs=frozenset(blobs),
        refs=frozenset(),
        snapshots=frozenset(),
        cache_dir=root,
    )
    return _piece(name, place, reason, strategy)


def _piece(name: str, place: Place, reason: str, plan: DeleteCacheStrategy, *first: Path) -> Piece:
    """A piece that shows the deleted paths, after the location of the model (`first`)."""
    kinds = (plan.files, plan.repos, plan.snapshots, plan.refs, plan.blobs)
    paths = dict.fromkeys([*first, *(path for kind in kinds for path in sorted(kind))])
    nbytes, texts = plan.expected_freed_size, tuple(map(str, paths))
    removal = Removal(name=name, place=place, why=reason, bytes=nbytes, paths=texts)
    return Piece(removal=removal, strategy=plan)


# removal


def remove(
    pieces: Sequence[Piece], planned: Callable[[], list[Piece]], *, passing_over: bool
) -> tuple[list[Removal], list[str]]:
    """Remove `pieces`, which `planned` lists again: a confirmation may have taken long.

    Returns what was removed, and one line per failure. With `passing_over`, pieces that have
    changed or cannot be removed are skipped; otherwise WriteFailed is raised, for use before
    anything is removed.
    """
    gone: list[Removal] = []
    kept: list[str] = []
    current = [piece.strategy for piece in planned()]
    for together in [[piece] for piece in pieces] if passing_over else [pieces]:
        try:
            for piece in together:
                if piece.strategy not in current:
                    raise WriteFailed(
                        f"`{shown(piece.removal.name, 200)}` has changed since it was listed",
                        hint="run the command again",
                    )
                _need_inside(piece)
            for piece in together:
                _delete(piece)
                gone.append(piece.removal)
        except WriteFailed as error:
            if not passing_over:
                raise
            kept.append(error.message)
    return gone, kept


def _need_inside(piece: Piece) -> None:
    """Raise WriteFailed unless all paths are below the cache without links.

    Top-level entries of the cache must not be links either, nor the directories of a repository
    that is removed as a whole.
    """
    root = piece.strategy.cache_dir
    assert root is not None
    within = ("blobs", "refs", "snapshots")
    inner = [repo / name / "x" for repo in piece.strategy.repos for name in within]
    for path in (*piece.deleted, *inner):
        parts = path.relative_to(root).parts
        folders = [root.joinpath(*parts[:n]) for n in range(1, max(2, len(parts)))]
        link = next((folder for folder in folders if folder.is_symlink()), None)
        if ".." in parts or link is not None:
            raise WriteFailed(
                f"`{shown(link or path)}` is outside of the cache, where nothing is removed",
                hint="remove the link, and its target if it is not needed, by hand",
            )


def _delete(piece: Piece) -> None:
    """Delete a piece. Raises WriteFailed, also for failures that the library only logs."""
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # avoids a printed traceback
    try:
        piece.strategy.execute()
        for path in piece.deleted:
            if os.path.lexists(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except OSError as error:
        place = f" (`{shown(Path(error.filename))}`)" if error.filename else ""
        raise WriteFailed(
            f"`{shown(piece.removal.name, 200)}` cannot be removed: {why(error)}{place}",
            hint="see who owns the files of the cache",
        ) from None
