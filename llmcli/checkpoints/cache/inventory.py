"""What models are on this machine, in the package and in the two caches, by the names of `-m`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from llmcli.checkpoints.cache.commits import shortened
from llmcli.checkpoints.cache.layout import (
    CachedFile,
    CachedRepository,
    CachedRevision,
    hub_cache,
    read_hub_cache,
)
from llmcli.checkpoints.cache.sizes import facts, on_disk, regular
from llmcli.checkpoints.cache.used import WEIGHTS
from llmcli.checkpoints.catalog import CATALOG, CatalogEntry, cache_dir
from llmcli.checkpoints.folder import INDEX
from llmcli.checkpoints.hub.files import BROKEN, COMPLETE, state_of
from llmcli.checkpoints.hub.marks import absent, unverified
from llmcli.checkpoints.split import part_names
from llmcli.reports.models import CacheUse, StoredModel


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A model and where it comes from: a catalog `entry`, or `files` of a revision in the hub's."""

    model: StoredModel
    entry: CatalogEntry | None = None
    repository: CachedRepository | None = None
    revision: CachedRevision | None = None
    files: tuple[CachedFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The hub's cache as it was read at `root`, and ours at `own`, both without links in them."""

    own: Path
    root: Path
    repositories: tuple[CachedRepository, ...]
    others: int

    @classmethod
    def read(cls) -> Inventory:
        """Looks at the file names of both caches; opens no weights, and never raises."""
        root = hub_cache()
        repositories, others = read_hub_cache(root)
        own = Path(os.path.realpath(cache_dir() / "models"))
        return cls(own=own, root=root, repositories=tuple(repositories), others=others)

    def stored(self) -> Iterator[Stored]:
        """The catalog, here or not, then the hub's cache by name."""
        for entry in CATALOG.values():
            found = self._of_catalog(entry)
            told = replace(found.model, license=entry.license, purpose=entry.purpose)
            yield replace(found, model=told)
        for repository in self.repositories:
            for revision in repository.revisions:
                if revision.files and not pinned(repository, revision):
                    yield from _rows(repository, revision)
            if not any(revision.files for revision in repository.revisions):
                yield Stored(model=_unreadable(repository), repository=repository)

    def warnings(self) -> tuple[str, ...]:
        """A line for each repository that cannot be read."""
        return tuple(f"`{r.name}` in the hub cache: {r.problem}" for r in self.repositories
                     if r.problem)  # fmt: skip

    def caches(self) -> tuple[CacheUse, ...]:
        """What both of them take."""
        files = [f for r in self.repositories for v in r.revisions for f in v.files]
        own = sum(size for _, size, _ in regular(self.own))
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
                        return _row(entry.name, repository, revision, revision.files)
        elif entry.file is not None and entry.is_cached():
            return Stored(model=_of_file(entry, entry.file), entry=entry)
        return Stored(model=_nowhere(entry), entry=entry)


def pinned(repository: CachedRepository, revision: CachedRevision) -> bool:
    """Whether it is a model of the catalog, which has a name for it."""
    return any(_is_of(entry, repository, revision) for entry in CATALOG.values())


def _is_of(entry: CatalogEntry, repository: CachedRepository, revision: CachedRevision) -> bool:
    return entry.repository == repository.name and entry.revision == revision.commit


def groups(revision: CachedRevision) -> list[list[CachedFile]]:
    """Its GGUF models, the parts of one together, by name."""
    found: dict[str, list[CachedFile]] = {}
    for file in revision.files:
        if file.name.lower().endswith(".gguf"):
            found.setdefault((part_names(file.name) or (file.name,))[0], []).append(file)
    return list(found.values())


def name_of(repository: CachedRepository, revision: CachedRevision) -> str:
    """`org/name` for the default branch, else with a branch, a tag or the commit behind it.

    Of the commit as many digits as tell it from the others here.
    """
    if "main" in revision.refs:
        return repository.name
    short = shortened(revision.commit, [one.commit for one in repository.revisions])
    return f"{repository.name}@{next(iter(revision.refs), short)}"


def _rows(repository: CachedRepository, revision: CachedRevision) -> Iterator[Stored]:
    """One model, or where a repository has GGUF files (each is one) a model for each of them."""
    name = name_of(repository, revision)
    ggufs = groups(revision)
    among = {file.name for group in ggufs for file in group}
    rest = tuple(file for file in revision.files if file.name not in among)
    if not ggufs or any(file.name.endswith(".safetensors") for file in rest):
        yield _row(name, repository, revision, rest)
    _, at, rev = name.partition("@")
    for group in ggufs:
        yield _row(
            f"hf:{repository.name}/{group[0].name}{at}{rev}", repository, revision, tuple(group)
        )


def _row(
    name: str, repository: CachedRepository, revision: CachedRevision, files: tuple[CachedFile, ...]
) -> Stored:
    one = _is_gguf(files)
    here = [file for file in files if file.key is not None]
    weights = [file for file in here if file.name.lower().endswith(WEIGHTS)]
    model = StoredModel(
        name=name,
        place="hub cache",
        path=str(files[0].path if one else revision.path),
        bytes=on_disk(files),
        files=len(files),
        revision=revision.commit,
        refs=revision.refs,
        last_used=max((file.used for file in weights or here), default=None),
        state=state(revision, files),
    )
    return Stored(model=model, repository=repository, revision=revision, files=files)


def state(revision: CachedRevision, files: tuple[CachedFile, ...]) -> str:
    """`complete`, or what is wrong with the model that `files` of the revision are."""
    marks = unverified(revision.path)
    here = {file.name for file in files if file.key is not None and file.name not in marks}
    if _is_gguf(files):
        parts = part_names(files[0].name) or (files[0].name,)
        return COMPLETE if here.issuperset(parts) else BROKEN
    if len(here) < len(files):
        return BROKEN
    return state_of(here, revision.path / INDEX, absent(revision.path))


def _is_gguf(files: tuple[CachedFile, ...]) -> bool:
    return len(files) > 0 and files[0].name.lower().endswith(".gguf")


def _unreadable(repository: CachedRepository) -> StoredModel:
    return StoredModel(
        name=repository.name, place="hub cache", path=str(repository.path), bytes=0, files=0,
        revision=None, refs=(), last_used=None, state="unreadable" if repository.problem else
        "nothing in it",
    )  # fmt: skip


def _of_file(entry: CatalogEntry, path: Path) -> StoredModel:
    bundled = entry.folder is not None
    files = list(regular(path)) if bundled else [facts(path)]
    return StoredModel(
        name=entry.name,
        place="package" if bundled else "llmcli cache",
        path=str(path),
        bytes=sum(size for _, size, _ in files),
        files=len(files),
        revision=None,
        refs=(),
        last_used=None if bundled else max(used for _, _, used in files),
        state=COMPLETE,
    )


def _nowhere(entry: CatalogEntry) -> StoredModel:
    return StoredModel(
        name=entry.name, place="nowhere", path=None, bytes=entry.size, files=0,
        revision=entry.revision, refs=(), last_used=None, state="not fetched",
    )  # fmt: skip
