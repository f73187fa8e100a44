"""Models on this machine, in the package and both caches, by their names for `-m`.

huggingface_hub reads the hub cache. No network, no torch.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.checkpoints.catalog import CATALOG, CatalogEntry, cache_dir
from llmcli.checkpoints.files import shown, why
from llmcli.checkpoints.folder import INDEX
from llmcli.checkpoints.hub.library import PREFIX, hub_cache
from llmcli.checkpoints.hub.listing import BROKEN, COMPLETE, WEIGHTS, absent, emptied, state_of
from llmcli.checkpoints.names import HubId
from llmcli.checkpoints.split import part_names
from llmcli.records.models import CacheUse, StoredModel

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo

    Files = Mapping[str, CachedFileInfo]

SHORT = 12  # least digits of a commit in a list, more if ambiguous
_OTHERS = ("datasets--", "spaces--", "kernels--")
_LARGEST_REF = 4096  # bytes; a reference holds a commit, 40 digits


@dataclass(frozen=True, kw_only=True)
class CachedRepository:
    """A model's repository in the hub cache, as scanned by huggingface_hub.

    `scanned` is None without snapshots, or if reading failed (reason in `problem`).
    """

    name: str
    path: Path
    scanned: CachedRepoInfo | None = None
    problem: str = ""

    @property
    def revisions(self) -> list[CachedRevisionInfo]:
        """Revisions sorted by commit."""
        found = () if self.scanned is None else self.scanned.revisions
        return sorted(found, key=lambda revision: revision.commit_hash)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A model; if it is in the hub cache, with the `files` of a revision that it consists of.

    `why`: the reason to remove it, if llmcli proposes that.
    """

    model: StoredModel
    repository: CachedRepository | None = None
    revision: CachedRevisionInfo | None = None
    files: Files = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The contents of the hub cache at `root`, and our cache at `own`; both paths resolved.

    `others`: number of repositories in the hub cache that are not models.
    """

    own: Path
    root: Path
    repositories: tuple[CachedRepository, ...]
    others: int

    @classmethod
    def read(cls) -> Inventory:
        """List the files of both caches, without opening weights. Never raises."""
        root, names = hub_cache(), list[str]()
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(root))
        return cls(
            own=Path(os.path.realpath(cache_dir() / "models")),
            root=root,
            repositories=tuple(_scan(root / name) for name in names if name.startswith(PREFIX)),
            others=sum(name.startswith(_OTHERS) for name in names),
        )

    def stored(self) -> Iterator[Stored]:
        """Yield the catalog (stored or not), then the hub cache by name."""
        for entry in CATALOG.values():
            found = self._of_catalog(entry)
            model = replace(found.model, license=entry.license, purpose=entry.purpose)
            yield replace(found, model=model)
        for repository in self.repositories:
            filled = [revision for revision in repository.revisions if revision.files]
            for revision in filled:
                if not pinned(repository, revision):
                    yield from _models(repository, revision)
            if not filled:
                state = "unreadable" if repository.problem else "nothing in it"
                model = StoredModel(
                    name=repository.name, place="hub cache", path=str(repository.path), state=state
                )
                yield Stored(model=model, repository=repository)

    def warnings(self) -> tuple[str, ...]:
        """One line for each unreadable repository."""
        unread = [one for one in self.repositories if one.problem]
        return tuple(f"`{one.name}` in the hub cache: {one.problem}" for one in unread)

    def caches(self) -> tuple[CacheUse, ...]:
        """Disk use of both caches."""
        files = [f for r in self.repositories for v in r.revisions for f in v.files]
        own = sum(size for size, _ in sizes(self.own))
        return (
            CacheUse(place="llmcli cache", path=str(self.own.parent), bytes=own),
            CacheUse(
                place="hub cache", path=str(self.root), bytes=_on_disk(files), others=self.others
            ),
        )

    def _of_catalog(self, entry: CatalogEntry) -> Stored:
        for repository in self.repositories:
            for revision in repository.revisions:
                if revision.files and _commit(repository, revision) == entry.hub_id:
                    return stored_as(entry.name, repository, revision, files_of(revision))
        model = StoredModel(name=entry.name, place="nowhere", bytes=entry.size, state="not fetched")
        if entry.file is None or not entry.is_cached():
            commit = entry.hub_id.revision if entry.hub_id else None
            return Stored(model=replace(model, revision=commit))
        files = list(sizes(entry.file))
        own = entry.folder is None
        found = replace(
            model,
            place="llmcli cache" if own else "package",
            path=str(entry.file),
            bytes=sum(size for size, _ in files),
            files=len(files),
            last_used=max((used for _, used in files), default=None) if own else None,
            state=COMPLETE,
        )
        return Stored(model=found)


def _scan(path: Path) -> CachedRepository:
    """The repository at `path`. Never raises: a read error becomes its `problem`."""
    from huggingface_hub.errors import CorruptedCacheException

    name = path.name.removeprefix(PREFIX).replace("--", "/")
    if os.path.isdir(path) and not os.path.lexists(path / "snapshots"):
        return CachedRepository(name=name, path=path)  # a download that has just begun
    try:
        _check(path)
        return CachedRepository(name=name, path=path, scanned=_within(_scanned(path)))
    except (OSError, ValueError, CorruptedCacheException) as error:
        text = why(error) if isinstance(error, OSError) else str(error)
        return CachedRepository(
            name=name, path=path, problem=shown(text[:1].lower() + text[1:], 300)
        )


def _scanned(path: Path) -> CachedRepoInfo:
    # one by one: `scan_cache_dir` lists nothing if one file cannot be read, and takes all again
    try:
        from huggingface_hub.utils._cache_manager import _scan_cached_repo
    except ImportError:  # it is private, and another version may not have it
        from huggingface_hub import scan_cache_dir

        found = {one.repo_path.name: one for one in scan_cache_dir(path.parent).repos}
        if path.name not in found:
            raise ValueError("huggingface_hub cannot read it") from None
        return found[path.name]
    return _scan_cached_repo(path)


def _check(repository: Path) -> None:
    """Raise for what the library would hang at (a pipe), or take for empty (no permission)."""

    def unreadable(error: OSError) -> None:
        if isinstance(error, PermissionError):
            raise error

    for where, _, names in os.walk(repository / "refs"):
        for name in names:
            path = os.path.join(where, name)
            if not os.path.isfile(path) or os.path.getsize(path) > _LARGEST_REF:
                raise ValueError(f"the reference `{shown(name)}` is no file with a commit")
    for _ in os.walk(repository / "snapshots", onerror=unreadable):
        pass


def _within(repository: CachedRepoInfo) -> CachedRepoInfo:
    """`repository` without blobs outside of it, which the library would delete, too.

    A link that leaves the repository counts as a file itself.
    """

    def file(one: CachedFileInfo) -> CachedFileInfo:
        if one.blob_path in (one.file_path, repository.repo_path / "blobs" / one.blob_path.name):
            return one
        return replace(one, blob_path=one.file_path, size_on_disk=0)

    found = (replace(one, files=frozenset(map(file, one.files))) for one in repository.revisions)
    return replace(repository, revisions=frozenset(found))


def pinned(repository: CachedRepository, revision: CachedRevisionInfo) -> bool:
    """Whether the revision is pinned by a catalog entry."""
    return any(_commit(repository, revision) == entry.hub_id for entry in CATALOG.values())


def _commit(repository: CachedRepository, revision: CachedRevisionInfo) -> HubId:
    return HubId(repository=repository.name, revision=revision.commit_hash)


def name_of(repository: CachedRepository, revision: CachedRevisionInfo) -> str:
    """`org/name` for the default branch, otherwise with `@` and a branch, tag or commit.

    The commit is shortened to an unambiguous prefix.
    """
    if "main" in revision.refs:
        return repository.name
    short = _shortened(revision.commit_hash, [one.commit_hash for one in repository.revisions])
    return f"{repository.name}@{min(revision.refs, default=short)}"


def _shortened(commit: str, commits: Collection[str]) -> str:
    """The shortest unambiguous prefix of `commit` in `commits`, at least `SHORT` digits."""
    digits = SHORT
    while digits < len(commit) and sum(one.startswith(commit[:digits]) for one in commits) > 1:
        digits += 1
    return commit[:digits]


def files_of(revision: CachedRevisionInfo) -> dict[str, CachedFileInfo]:
    """The files of a snapshot, sorted by their relative names."""
    found = {
        file.file_path.relative_to(revision.snapshot_path).as_posix(): file
        for file in revision.files
    }
    return dict(sorted(found.items()))


def _models(repository: CachedRepository, revision: CachedRevisionInfo) -> Iterator[Stored]:
    """One model, or one per GGUF model if the repository has GGUF files."""
    name, files = name_of(repository, revision), files_of(revision)
    ggufs: dict[str, dict[str, CachedFileInfo]] = {}  # grouped by model
    for file in [file for file in files if file.lower().endswith(".gguf")]:
        ggufs.setdefault((part_names(file) or (file,))[0], {})[file] = files.pop(file)
    if not ggufs or any(file.endswith(".safetensors") for file in files):
        yield stored_as(name, repository, revision, files)
    _, at, rev = name.partition("@")
    for parts in ggufs.values():
        first = f"hf:{repository.name}/{next(iter(parts))}{at}{rev}"
        yield stored_as(first, repository, revision, parts)


def stored_as(
    name: str, repository: CachedRepository, revision: CachedRevisionInfo, files: Files
) -> Stored:
    """The model of that name that consists of `files` of a revision."""
    snapshot, first = revision.snapshot_path, next(iter(files), "")
    usable = {one for one in files if not emptied(snapshot / one)}
    path = snapshot
    if first.lower().endswith(".gguf"):
        path = files[first].file_path
        state = COMPLETE if usable.issuperset(part_names(first) or (first,)) else BROKEN
    elif len(usable) < len(files):
        state = BROKEN
    else:
        state = state_of(usable, snapshot / INDEX, absent(snapshot))
    weights = [file for one, file in files.items() if one.lower().endswith(WEIGHTS)]
    used = [(f.blob_last_accessed, f.blob_last_modified) for f in weights or files.values()]
    model = StoredModel(
        name=name,
        place="hub cache",
        path=str(path),
        bytes=_on_disk(files.values()),
        files=len(files),
        revision=revision.commit_hash,
        refs=tuple(sorted(revision.refs)),
        last_used=max(map(max, used), default=None),
        state=state,
    )
    return Stored(model=model, repository=repository, revision=revision, files=files)


def _on_disk(files: Iterable[CachedFileInfo]) -> int:
    """Bytes of the files; blobs shared by snapshots or repositories are counted once."""
    return sum({os.path.realpath(file.blob_path): file.size_on_disk for file in files}.values())


def sizes(path: Path) -> Iterator[tuple[int, float]]:
    """Bytes and last use of a file, or of each below a directory; links count 0 bytes."""
    for file in [path] if path.is_symlink() else _files_at(path):
        with contextlib.suppress(OSError):
            status = os.lstat(file)
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            yield size, max(status.st_atime, status.st_mtime)


def _files_at(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [Path(where) / name for where, _, names in os.walk(path) for name in names]


def bytes_at(path: Path) -> int:
    """Bytes of the model at `path`: a file with all its parts, or the files of a directory."""
    parts = map(path.with_name, part_names(path.name) or (path.name,))
    sizes = {}
    for file in _files_at(path) if path.is_dir() else parts:
        with contextlib.suppress(OSError):
            status = file.stat()
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
