"""Removing models from the two caches: what goes together, who may be using it, and nothing else.

Every path comes from a listing of the cache, none from what was typed or from inside a file, and
is removed only if real directories lead to it from the cache's own: a link is never followed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmcli.checkpoints.cache.inventory import Inventory
from llmcli.checkpoints.cache.layout import CachedFile, CachedRepository, CachedRevision
from llmcli.checkpoints.cache.sizes import bytes_below
from llmcli.checkpoints.cache.used import WEIGHTS, taken
from llmcli.checkpoints.files import shown, why
from llmcli.errors import WriteFailed
from llmcli.reports.models import Removal


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is removed together: `paths` in that order, all below the cache `root`.

    `locks` are what others hold who use it or fetch it. `repository` is removed, too, once no
    snapshot is left in it.
    """

    told: Removal
    root: Path
    paths: tuple[Path, ...]
    locks: tuple[Path, ...]
    repository: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some `files` of a revision, or all, that are to be removed under the name `name`."""

    name: str
    why: str
    repository: CachedRepository
    revision: CachedRevision
    files: tuple[CachedFile, ...]


def of_hub(parts: Sequence[Part], inventory: Inventory) -> list[Piece]:
    """A piece for each part: its links and branches, then the blobs that nothing else links to."""
    stays = _staying(parts, inventory)
    kept, keys = {file.blob for file in stays}, {file.key for file in stays} | {None}
    alive = {file.path for file in stays}
    last = {part.revision.path: part for part in parts}
    pieces = []
    for part in parts:
        blobs, freed = _own_blobs(part.repository), 0
        whole = part is last[part.revision.path] and alive.isdisjoint(
            file.path for file in part.revision.files
        )
        files = part.revision.files if whole else part.files
        gone = []
        for file in files:
            inside = file.blob.parent == blobs or file.blob == file.path
            if inside and file.key not in keys:
                keys.add(file.key)
                freed += file.size
            if file.blob.parent == blobs and file.blob not in kept:
                kept.add(file.blob)
                gone.append(file.blob)
        refs = [part.repository.path / "refs" / ref for ref in part.revision.refs]
        first = [*refs, part.revision.path] if whole else [file.path for file in files]
        pieces.append(
            _piece(part.name, part.why, freed, (*first, *gone), inventory.root, part.repository,
                   [p.revision.path for p in parts if p.repository is part.repository])
        )  # fmt: skip
    return pieces


def of_repository(
    repository: CachedRepository, name: str, reason: str, paths: Sequence[Path], root: Path
) -> Piece:
    """Files in `repository` that no snapshot links to, or the whole of it.

    That needs the locks of all snapshots, also of those that could not be read.
    """
    freed = sum(map(bytes_below, paths))
    homes = [
        home
        for home in sorted(repository.path.glob("snapshots/*") if repository.path in paths else ())
        if home.is_dir() and not home.is_symlink()
    ]
    return _piece(name, reason, freed, tuple(paths), root, repository, homes)


def of_own(folder: Path, name: str, reason: str, paths: Sequence[Path], root: Path) -> Piece:
    """`paths` in the directory `folder` of our cache, or that directory itself."""
    told = Removal(
        name=name, place="llmcli cache", why=reason, bytes=sum(map(bytes_below, paths)),
        paths=tuple(map(str, paths)),
    )  # fmt: skip
    return Piece(told=told, root=root, paths=tuple(paths), locks=(folder, folder / ".lock"))


def remove(
    pieces: Sequence[Piece], planned: Callable[[], list[Piece]], *, passing_over: bool
) -> tuple[list[Removal], list[str]]:
    """Removes `pieces`; what `planned` lists no longer once all locks are held stays.

    Returns what is gone, and lines about what is not. Where something is in use or cannot be
    removed: with `passing_over` the rest goes; else WriteFailed, and for what is in use before
    anything is removed.
    """
    gone: list[Removal] = []
    kept: list[str] = []
    for together in [[piece] for piece in pieces] if passing_over else [pieces]:
        try:
            _remove_together(together, planned)
        except WriteFailed as error:
            if not passing_over:
                raise
            kept.append(error.message)
        else:
            gone += [piece.told for piece in together]
    return gone, kept


def _remove_together(pieces: Sequence[Piece], planned: Callable[[], list[Piece]]) -> None:
    names = shown(", ".join(piece.told.name for piece in pieces), 200)
    for piece in pieces:
        for path in piece.paths:
            _need_inside(path, piece.root)
    try:
        with taken(tuple(lock for piece in pieces for lock in piece.locks)) as holder:
            if holder is not None:
                raise WriteFailed(
                    f"`{names}` is in use: another process holds `{shown(holder)}`",
                    hint="wait until that one has ended",
                )
            # a download may have ended since, whose snapshot links to a blob of the first plan
            still = {path for piece in planned() for path in piece.paths}
            for piece in pieces:
                _remove(piece, still)
    except OSError as error:
        place = f" (`{shown(Path(error.filename))}`)" if error.filename else ""
        raise WriteFailed(
            f"`{names}` cannot be removed: {why(error)}{place}",
            hint="see who owns the files of the cache",
        ) from None


def _staying(parts: Sequence[Part], inventory: Inventory) -> list[CachedFile]:
    """All files of the cache but those of `parts`, and but what is no model without them."""
    gone = {file.path for part in parts for file in part.files}
    for revision in {part.revision.path: part.revision for part in parts}.values():
        rest = [file for file in revision.files if file.path not in gone]
        if not any(file.name.lower().endswith(WEIGHTS) for file in rest):
            gone.update(file.path for file in rest)  # a card and a configuration
    return [
        file
        for repository in inventory.repositories
        for revision in repository.revisions
        for file in revision.files
        if file.path not in gone
    ]


def _own_blobs(repository: CachedRepository) -> Path:
    return repository.path / "blobs"


def _piece(
    name: str, reason: str, freed: int, paths: tuple[Path, ...], root: Path,
    repository: CachedRepository, homes: Iterable[Path],
) -> Piece:  # fmt: skip
    listed = sorted(paths, key=lambda path: path.parent.name != "snapshots")  # where it lies
    told = Removal(
        name=name, place="hub cache", why=reason, bytes=freed, paths=tuple(map(str, listed))
    )
    locks = (*homes, *sorted(repository.locks.glob("*.lock")))
    return Piece(told=told, root=root, paths=paths, locks=locks, repository=repository.path)


def _remove(piece: Piece, still: set[Path]) -> None:
    for path in piece.paths:
        if path in still:
            _delete(path, piece.root)
    repository = piece.repository
    if repository is not None and not any(s.is_dir() for s in repository.glob("snapshots/*")):
        _delete(repository, piece.root)


def _need_inside(path: Path, root: Path) -> None:
    """Raises WriteFailed unless real directories lead from `root` to `path`.

    What lies in the cache itself is a directory of one model, and may be no link either.
    """
    inner = path.relative_to(root)
    folders = [root / Path(*inner.parts[:depth]) for depth in range(1, max(2, len(inner.parts)))]
    link = next((folder for folder in folders if folder.is_symlink()), None)
    if ".." in inner.parts or link is not None:
        raise WriteFailed(
            f"`{shown(link or path)}` leads out of the cache, where nothing is removed",
            hint="remove the link by hand, and what it leads to if that is not needed either",
        )


def _delete(path: Path, root: Path) -> None:
    """A file, a link (never what it leads to), or a directory with all that is in it."""
    _need_inside(path, root)
    if path.is_symlink() and path.parent.name == "blobs":
        _delete_shared(path, root)
    elif path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def _delete_shared(blob: Path, root: Path) -> None:
    """A blob that the library shares between repositories: it counts who else needs it."""
    from huggingface_hub import DeleteCacheStrategy

    nothing: frozenset[Path] = frozenset()
    strategy = DeleteCacheStrategy(
        expected_freed_size=0, blobs=frozenset({blob}), refs=nothing, repos=nothing,
        snapshots=nothing, cache_dir=root,
    )  # fmt: skip
    strategy.execute()
    if os.path.lexists(blob):  # the library only logs what it may not remove
        raise PermissionError(errno.EACCES, "permission denied", str(blob))
