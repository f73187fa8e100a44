"""Removes models from both caches. huggingface_hub finds and deletes files of the hub cache.

Checked here in addition: whether another process fetches them, whether real directories (no links)
lead to them from the cache, and whether they are gone afterwards. Every path comes from a listing
of the cache, never from user input or file contents.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.checkpoints.cache.hub import CachedRepository, files_of, lengthened
from llmcli.checkpoints.cache.inventory import Inventory, Stored, sizes
from llmcli.checkpoints.catalog import CATALOG
from llmcli.checkpoints.fetch import LOCK
from llmcli.checkpoints.files import shown, why
from llmcli.checkpoints.hub.files import WEIGHTS
from llmcli.checkpoints.names import HubId, parse, typed
from llmcli.checkpoints.split import part_names
from llmcli.errors import ModelNotFound, UsageError, WriteFailed
from llmcli.records.models import Place, Removal

if TYPE_CHECKING:
    from huggingface_hub import (
        CachedFileInfo,
        CachedRevisionInfo,
        DeleteCacheStrategy,
        HFCacheInfo,
    )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Files removed together, by the library's `strategy` for the cache `strategy.cache_dir`.

    `locks`: files that processes lock while they fetch the model.
    """

    removal: Removal
    locks: tuple[Path, ...]
    strategy: DeleteCacheStrategy

    @property
    def place(self) -> Path:
        """Where the model is: the first of the displayed paths."""
        return Path(self.removal.paths[0])

    @property
    def deleted(self) -> tuple[Path, ...]:
        """All deleted paths."""
        plan = self.strategy
        return (*plan.repos, *plan.snapshots, *plan.files, *plan.refs, *plan.blobs)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some or all `files` of a revision, to be removed as model `name`."""

    name: str
    why: str
    repository: CachedRepository
    revision: CachedRevisionInfo
    files: Mapping[str, CachedFileInfo]


# arguments of `models rm` → pieces


def pieces_of(
    names: Sequence[str], inventory: Inventory, revision: str | None = None
) -> list[Piece]:
    """The pieces to remove for `names`, which have the form of `-m`; duplicates are merged.

    `revision` applies to all names; None: the name's own or the default branch. Raises UsageError
    for a model outside the caches, ModelNotFound for one that is not on this machine.
    """
    found = [_selected(name, inventory, revision) for name in dict.fromkeys(names)]
    pieces = [one for one in found if isinstance(one, Piece)]
    return pieces + of_hub([one for one in found if isinstance(one, Part)])


def _selected(name: str, inventory: Inventory, revision: str | None) -> Part | Piece:
    """The part of a repository, or the whole other piece, named by `name`."""
    for stored in inventory.stored() if revision is None else ():
        if stored.model.name == name:
            if stored.model.place == "package":
                raise UsageError(
                    f"`{name}` ships with llmcli and cannot be removed by itself",
                    hint="`llmcli models list` shows what can",
                )
            if stored.model.place == "nowhere":
                raise _not_here(name, inventory, revision)
            return chosen(stored, inventory, "")
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


def chosen(stored: Stored, inventory: Inventory, reason: str) -> Part | Piece:
    """The part or piece to remove for a cached model of the inventory."""
    name = stored.model.name
    if stored.repository is None:
        assert stored.model.path is not None
        folder = inventory.own / Path(stored.model.path).parent.name
        return of_own(folder, name, reason, [folder])
    if stored.revision is None:
        return whole_repository(stored.repository, reason)
    return Part(
        name=name, why=reason, repository=stored.repository, revision=stored.revision,
        files=stored.files,
    )  # fmt: skip


def _of_id(name: str, hub: HubId, inventory: Inventory) -> Part | None:
    """The part for an id that the list shows differently: a branch, a commit, all GGUF files."""
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
                return Part(name=name, why="", repository=repository, revision=revision,
                            files=files)  # fmt: skip
    return None


def _not_here(name: str, inventory: Inventory, revision: str | None) -> ModelNotFound:
    here = [s.model.name for s in inventory.stored() if s.model.place != "nowhere"]
    near = difflib.get_close_matches(name, here, n=1)
    hint = "`llmcli models list` shows what is"
    if revision is not None and name in here:
        message = f"revision `{shown(revision)}` of `{shown(name)}` is not on this machine"
        return ModelNotFound(message, hint=hint)
    if near and name not in CATALOG:
        hint = f"did you mean `{shown(near[0], 200)}`?"
    return ModelNotFound(f"`{typed(name, revision)}` is not on this machine", hint=hint)


# pieces


def of_hub(parts: Sequence[Part]) -> list[Piece]:
    """One piece per part, in order: what the library deletes after the parts before it.

    Shared files go with the last part that needs them. Small files without remaining weights go
    too.
    """
    left: dict[Path, HFCacheInfo | None] = {}
    pieces = []
    for part in parts:
        path, snapshot = part.repository.path, part.revision.snapshot_path
        info = left.get(path, part.repository.scanned)
        repository = None if info is None else next(iter(info.repos), None)
        revisions = frozenset() if repository is None else repository.revisions
        revision = next((one for one in revisions if one.snapshot_path == snapshot), None)
        if info is None or repository is None or revision is None:
            continue  # already removed by another part
        gone = {file.file_path for file in part.files.values()}
        rest = frozenset(file for file in revision.files if file.file_path not in gone)
        if any(file.file_path.name.lower().endswith(WEIGHTS) for file in rest):
            strategy = info.delete_files(*(revision.files - rest))
            remaining = revisions - {revision} | {replace(revision, files=rest)}
            where = sorted(strategy.files)
        else:
            strategy = info.delete_revisions(revision.commit_hash)
            remaining, where = revisions - {revision}, [snapshot]
        repositories = {replace(repository, revisions=remaining)} if remaining else set()
        left[path] = replace(info, repos=frozenset(repositories))
        pieces.append(_hub_piece(part.name, part.why, part.repository, strategy, where))
    return pieces


def whole_repository(repository: CachedRepository, reason: str) -> Piece:
    """A whole repository, also an unreadable one."""
    strategy = _strategy(repository.path.parent, repos=[repository.path])
    return _hub_piece(repository.name, reason, repository, strategy)


def unlinked(repository: CachedRepository, reason: str, blobs: Sequence[Path]) -> Piece:
    """Files in `repository` that no snapshot links to."""
    strategy = _strategy(repository.path.parent, blobs=blobs)
    return _hub_piece(repository.name, reason, repository, strategy)


def of_own(folder: Path, name: str, reason: str, paths: Sequence[Path]) -> Piece:
    """`paths` in the directory `folder` of our cache, or that directory itself."""
    strategy = _strategy(folder.parent, repos=paths)
    return _piece(name, "llmcli cache", reason, strategy, (folder / LOCK,), paths)


def _strategy(
    root: Path, *, repos: Sequence[Path] = (), blobs: Sequence[Path] = ()
) -> DeleteCacheStrategy:
    """A strategy for paths that a scan does not list."""
    from huggingface_hub import DeleteCacheStrategy

    freed = sum(size for path in (*repos, *blobs) for size, _ in sizes(path))
    return DeleteCacheStrategy(
        expected_freed_size=freed,
        repos=frozenset(repos),
        blobs=frozenset(blobs),
        refs=frozenset(),
        snapshots=frozenset(),
        cache_dir=root,
    )


def _hub_piece(
    name: str,
    reason: str,
    repository: CachedRepository,
    strategy: DeleteCacheStrategy,
    where: Sequence[Path] = (),
) -> Piece:
    """Build a piece; `where` (the model's location) comes first in the displayed paths."""
    rest = [strategy.repos, strategy.snapshots, strategy.refs, strategy.blobs]
    paths = dict.fromkeys([*where, *(path for kind in rest for path in sorted(kind))])
    locks = tuple(sorted(repository.locks.glob("*.lock")))
    return _piece(name, "hub cache", reason, strategy, locks, [*paths])


def _piece(
    name: str,
    place: Place,
    reason: str,
    strategy: DeleteCacheStrategy,
    locks: tuple[Path, ...],
    paths: Sequence[Path],
) -> Piece:
    nbytes, texts = strategy.expected_freed_size, tuple(map(str, paths))
    removal = Removal(name=name, place=place, why=reason, bytes=nbytes, paths=texts)
    return Piece(removal=removal, locks=locks, strategy=strategy)


# removal


def remove(
    pieces: Sequence[Piece], planned: Callable[[], list[Piece]], *, passing_over: bool
) -> tuple[list[Removal], list[str]]:
    """Remove `pieces` as `planned` lists them again once no lock is held.

    Returns what was removed, and one line per failure. With `passing_over`, pieces being fetched or
    not removable are skipped; otherwise WriteFailed is raised, for use before anything is removed.
    """
    gone: list[Removal] = []
    kept: list[str] = []
    for together in [[piece] for piece in pieces] if passing_over else [pieces]:
        try:
            gone += _remove_together(together, planned)
        except WriteFailed as error:
            if not passing_over:
                raise
            kept.append(error.message)
    return gone, kept


def _remove_together(
    pieces: Sequence[Piece], planned: Callable[[], list[Piece]]
) -> list[Removal]:
    names = shown(", ".join(piece.removal.name for piece in pieces), 200)
    wanted = {(piece.removal.name, piece.removal.why) for piece in pieces}
    listed = {path for piece in pieces for path in (piece.place, *piece.deleted)}
    _need_free(names, pieces)
    # a download may have finished meanwhile and link to a blob of the first plan
    current = [p for p in planned() if (p.removal.name, p.removal.why) in wanted]
    _need_free(names, current)
    for piece in current:
        _need_inside(piece)
        _need_listed(piece, listed)
    try:
        for piece in current:
            _delete(piece)
    except OSError as error:
        place = f" (`{shown(Path(error.filename))}`)" if error.filename else ""
        raise WriteFailed(
            f"`{names}` cannot be removed: {why(error)}{place}",
            hint="see who owns the files of the cache",
        ) from None
    return [piece.removal for piece in current]


def _need_free(names: str, pieces: Sequence[Piece]) -> None:
    """Raise WriteFailed if another process fetches one of `pieces`."""
    if holder := next((lock for piece in pieces for lock in piece.locks if is_locked(lock)), None):
        raise WriteFailed(
            f"`{names}` is in use: another process holds `{shown(holder)}`",
            hint="wait until that one has ended",
        )


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock file `path`, or it cannot be opened to tell."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


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


def _need_listed(piece: Piece, listed: Set[Path]) -> None:
    """Raise WriteFailed if anything but the `listed` paths, or what is in them, would go.

    Its name may denote another commit since it was listed, if the branch was fetched again.
    """
    inside = all(not listed.isdisjoint((path, *path.parents)) for path in piece.deleted)
    if piece.place not in listed or not inside:
        raise WriteFailed(
            f"`{shown(piece.removal.name, 200)}` has changed since it was listed",
            hint="run the command again",
        )


def _delete(piece: Piece) -> None:
    """Delete a piece. Raises OSError, also for failures that the library only logs."""
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # avoids a printed traceback
    piece.strategy.execute()
    for path in piece.deleted:
        if os.path.lexists(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
