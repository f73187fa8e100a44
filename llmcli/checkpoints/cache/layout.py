"""The models in the Hugging Face cache, as its directories have them. No network, no library.

The layout (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): `models--ORG--NAME`
with `refs/BRANCH` (a commit), `snapshots/COMMIT/…` (links) and `blobs/ETAG` (files). It is read
here, not by `scan_cache_dir`: that one drops a repository at its first broken link and all of
them at the first unreadable file, and those are what somebody looks for who wants to tidy up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from llmcli.checkpoints.files import shown, why
from llmcli.checkpoints.hub.library import check_settings
from llmcli.checkpoints.hub.listing import COMMIT

PREFIX = "models--"
_OTHERS = ("datasets--", "spaces--", "kernels--")
_MOST_FILES = 100_000  # of one repository; the largest public ones have some thousand


@dataclass(frozen=True, kw_only=True)
class CachedFile:
    """A file of a snapshot: `name` within it, the entry in `blobs` that it is (or itself).

    `key` is the same for the same bytes on the disk, None for a link to nothing. `used` is the
    later of its last access and modification, in seconds since 1970.
    """

    name: str
    path: Path
    blob: Path
    size: int = 0
    key: tuple[int, int] | None = None
    used: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CachedRevision:
    """One commit of a repository; `refs` are the branches and tags that point to it."""

    commit: str
    path: Path
    refs: tuple[str, ...]
    files: tuple[CachedFile, ...]


@dataclass(frozen=True, kw_only=True)
class CachedRepository:
    """A model's repository; `problem` says why it could not be read, empty where it could."""

    name: str
    path: Path
    revisions: tuple[CachedRevision, ...] = ()
    problem: str = ""

    @property
    def locks(self) -> Path:
        """Where those who download into it keep their lock files, `ETAG.lock`."""
        return self.path.parent / ".locks" / self.path.name


def hub_cache() -> Path:
    """The directory of the hub's cache, its own links followed; it may not exist."""
    check_settings()
    from huggingface_hub import constants  # 4 ms; knows all variables, older ones too

    return Path(os.path.realpath(Path(constants.HF_HUB_CACHE).expanduser()))


def read_hub_cache(root: Path) -> tuple[list[CachedRepository], int]:
    """The models in `root` by name, and how many repositories there are no models.

    Never raises: what cannot be read becomes the `problem` of its repository.
    """
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return [], 0
    found = [_repository(root / name) for name in names if name.startswith(PREFIX)]
    return found, sum(name.startswith(_OTHERS) for name in names)


def _repository(path: Path) -> CachedRepository:
    name = path.name.removeprefix(PREFIX).replace("--", "/")
    try:
        if not path.is_dir():
            return CachedRepository(name=name, path=path, problem="it is no directory")
        refs = _refs(path / "refs")
        revisions = tuple(
            CachedRevision(
                commit=entry.name,
                path=Path(entry.path),
                refs=tuple(sorted(ref for ref, commit in refs.items() if commit == entry.name)),
                files=_files(Path(entry.path)),
            )
            for entry in sorted(_entries(path / "snapshots"), key=lambda entry: entry.name)
            if entry.is_dir(follow_symlinks=False)
        )
    except (OSError, ValueError) as error:
        cause = why(error) if isinstance(error, OSError) else shown(error)
        return CachedRepository(name=name, path=path, problem=f"it cannot be read: {cause}")
    return CachedRepository(name=name, path=path, revisions=revisions)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walk(folder: Path) -> list[Path]:
    """All files and links below `folder`, links not followed; ValueError where they are too many.

    Raises OSError for a directory that cannot be read.
    """
    found: list[Path] = []
    pending = [folder]
    while pending:
        for entry in _entries(pending.pop()):
            inner = entry.is_dir(follow_symlinks=False)
            (pending if inner else found).append(Path(entry.path))
            if len(found) + len(pending) > _MOST_FILES:
                raise ValueError(f"more than {_MOST_FILES} files")
    return sorted(found)


def _refs(folder: Path) -> dict[str, str]:
    """Branch or tag -> commit; what is no commit is left out."""
    found = {}
    for path in _walk(folder):
        if path.is_file():
            with path.open("rb") as file:
                text = file.read(64).decode("ascii", "replace").strip()
            if COMMIT.fullmatch(text):
                found[path.relative_to(folder).as_posix()] = text
    return found


def _files(snapshot: Path) -> tuple[CachedFile, ...]:
    found = []
    for path in _walk(snapshot):
        name, blob = path.relative_to(snapshot).as_posix(), path
        if path.is_symlink():
            blob = Path(os.path.normpath(path.parent / os.readlink(path)))
        try:
            status = path.stat()
        except OSError:  # what it links to is gone
            found.append(CachedFile(name=name, path=path, blob=blob))
            continue
        key, used = (status.st_dev, status.st_ino), max(status.st_atime, status.st_mtime)
        found.append(
            CachedFile(name=name, path=path, blob=blob, size=status.st_size, key=key, used=used)
        )
    return tuple(found)
