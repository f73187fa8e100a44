"""Models on this machine, in the package and both caches, by their names for `-m`."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.checkpoints.cache.hub import (
    CachedRepository,
    files_of,
    hub_cache,
    on_disk,
    read_hub_cache,
    shortened,
)
from llmcli.checkpoints.catalog import CATALOG, CatalogEntry, cache_dir
from llmcli.checkpoints.folder import INDEX
from llmcli.checkpoints.hub.files import BROKEN, COMPLETE, WEIGHTS, absent, emptied, state_of
from llmcli.checkpoints.split import part_names
from llmcli.records.models import CacheUse, StoredModel

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRevisionInfo


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A model; if it is in the hub cache, with the `files` of a revision that it consists of."""

    model: StoredModel
    repository: CachedRepository | None = None
    revision: CachedRevisionInfo | None = None
    files: Mapping[str, CachedFileInfo] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The contents of the hub cache at `root`, and our cache at `own`; both paths resolved."""

    own: Path
    root: Path
    repositories: tuple[CachedRepository, ...]
    others: int

    @classmethod
    def read(cls) -> Inventory:
        """List the files of both caches, without opening weights. Never raises."""
        root = hub_cache()
        repositories, others = read_hub_cache(root)
        own = Path(os.path.realpath(cache_dir() / "models"))
        return cls(own=own, root=root, repositories=tuple(repositories), others=others)

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
                    yield from _rows(repository, revision)
            if not filled:
                yield Stored(model=_without_files(repository), repository=repository)

    def warnings(self) -> tuple[str, ...]:
        """One line for each unreadable repository."""
        return tuple(f"`{r.name}` in the hub cache: {r.problem}" for r in self.repositories
                     if r.problem)  # fmt: skip

    def caches(self) -> tuple[CacheUse, ...]:
        """Disk use of both caches."""
        files = [f for r in self.repositories for v in r.revisions for f in v.files]
        own = sum(size for size, _ in sizes(self.own))
        return (
            CacheUse(place="llmcli cache", path=str(self.own.parent), bytes=own),
            CacheUse(
                place="hub cache", path=str(self.root), bytes=on_disk(files), others=self.others
            ),
        )

    def _of_catalog(self, entry: CatalogEntry) -> Stored:
        if entry.repository is not None:
            for repository in self.repositories:
                for revision in repository.revisions:
                    if revision.files and _is_of(entry, repository, revision):
                        return _row(entry.name, repository, revision, files_of(revision))
        elif entry.file is not None and entry.is_cached():
            return Stored(model=_of_file(entry, entry.file))
        return Stored(model=_nowhere(entry))


def pinned(repository: CachedRepository, revision: CachedRevisionInfo) -> bool:
    """Whether the revision is pinned by a catalog entry."""
    return any(_is_of(entry, repository, revision) for entry in CATALOG.values())


def _is_of(
    entry: CatalogEntry, repository: CachedRepository, revision: CachedRevisionInfo
) -> bool:
    return entry.repository == repository.name and entry.revision == revision.commit_hash


def name_of(repository: CachedRepository, revision: CachedRevisionInfo) -> str:
    """`org/name` for the default branch, otherwise with `@` and a branch, tag or commit.

    The commit is shortened to an unambiguous prefix.
    """
    if "main" in revision.refs:
        return repository.name
    short = shortened(revision.commit_hash, [one.commit_hash for one in repository.revisions])
    return f"{repository.name}@{min(revision.refs, default=short)}"


def bytes_at(path: Path) -> int:
    """Bytes of the model at `path`: a file with all its parts, or the files of a directory."""
    found = [path.with_name(name) for name in part_names(path.name) or (path.name,)]
    if path.is_dir():
        found = [Path(where) / name for where, _, names in os.walk(path) for name in names]
    sizes = {}
    for file in found:
        with contextlib.suppress(OSError):
            status = file.stat()
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def _rows(repository: CachedRepository, revision: CachedRevisionInfo) -> Iterator[Stored]:
    """One model, or one per GGUF model if the repository has GGUF files."""
    name, files = name_of(repository, revision), files_of(revision)
    ggufs: dict[str, dict[str, CachedFileInfo]] = {}  # grouped by model
    for file in [file for file in files if file.lower().endswith(".gguf")]:
        ggufs.setdefault((part_names(file) or (file,))[0], {})[file] = files.pop(file)
    if not ggufs or any(file.endswith(".safetensors") for file in files):
        yield _row(name, repository, revision, files)
    _, at, rev = name.partition("@")
    for parts in ggufs.values():
        first = next(iter(parts))
        yield _row(f"hf:{repository.name}/{first}{at}{rev}", repository, revision, parts)


def _row(
    name: str, repository: CachedRepository, revision: CachedRevisionInfo,
    files: Mapping[str, CachedFileInfo],
) -> Stored:  # fmt: skip
    weights = [file for one, file in files.items() if one.lower().endswith(WEIGHTS)]
    path = next(iter(files.values())).file_path if _is_gguf(files) else revision.snapshot_path
    model = StoredModel(
        name=name,
        place="hub cache",
        path=str(path),
        bytes=on_disk(files.values()),
        files=len(files),
        revision=revision.commit_hash,
        refs=tuple(sorted(revision.refs)),
        last_used=max(
            max(file.blob_last_accessed, file.blob_last_modified)
            for file in weights or files.values()
        ),
        state=_state(revision, files),
    )
    return Stored(model=model, repository=repository, revision=revision, files=files)


def _state(revision: CachedRevisionInfo, files: Mapping[str, CachedFileInfo]) -> str:
    """`complete`, or the problem of the model that consists of `files`."""
    snapshot = revision.snapshot_path
    usable = {one for one in files if not emptied(snapshot / one)}
    if _is_gguf(files):
        first = next(iter(files))
        return COMPLETE if usable.issuperset(part_names(first) or (first,)) else BROKEN
    if len(usable) < len(files):
        return BROKEN
    return state_of(usable, snapshot / INDEX, absent(snapshot))


def _is_gguf(files: Mapping[str, CachedFileInfo]) -> bool:
    return next(iter(files)).lower().endswith(".gguf")


def _without_files(repository: CachedRepository) -> StoredModel:
    return StoredModel(
        name=repository.name, place="hub cache", path=str(repository.path), bytes=0, files=0,
        revision=None, refs=(), last_used=None,
        state="unreadable" if repository.problem else "nothing in it",
    )  # fmt: skip


def sizes(path: Path) -> Iterator[tuple[int, float]]:
    """Bytes and last use of a file, or of each below a directory; links count 0 bytes."""
    files = [path]
    if path.is_dir() and not path.is_symlink():
        files = [Path(where) / name for where, _, names in os.walk(path) for name in names]
    for file in files:
        with contextlib.suppress(OSError):
            status = os.lstat(file)
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            yield size, max(status.st_atime, status.st_mtime)


def _of_file(entry: CatalogEntry, path: Path) -> StoredModel:
    bundled = entry.folder is not None
    files = list(sizes(path))
    return StoredModel(
        name=entry.name,
        place="package" if bundled else "llmcli cache",
        path=str(path),
        bytes=sum(size for size, _ in files),
        files=len(files),
        revision=None,
        refs=(),
        last_used=None if bundled else max((used for _, used in files), default=None),
        state=COMPLETE,
    )


def _nowhere(entry: CatalogEntry) -> StoredModel:
    return StoredModel(
        name=entry.name, place="nowhere", path=None, bytes=entry.size, files=0,
        revision=entry.revision, refs=(), last_used=None, state="not fetched",
    )  # fmt: skip
