"""Models in the Hugging Face cache, as listed by huggingface_hub's `scan_cache_dir`.

No network. Listing imports the library; looking up one commit needs its constants only.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.checkpoints.files import shown, why
from llmcli.checkpoints.hub.library import check_settings
from llmcli.checkpoints.names import HubId

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

PREFIX = "models--"
SHORT = 12  # least digits of a commit in a list, more if ambiguous
_OTHERS = ("datasets--", "spaces--", "kernels--")
_SOME_DIGITS = re.compile(r"[0-9a-f]{7,39}")
_LARGEST_REF = 4096  # bytes; a reference holds a commit, 40 digits


@dataclass(frozen=True, kw_only=True)
class CachedRepository:
    """A model's repository in the cache, with the library's scan of this repository only.

    `scanned` is None without snapshots, or if reading failed (reason in `problem`).
    """

    name: str
    path: Path
    scanned: HFCacheInfo | None = None
    problem: str = ""

    @property
    def revisions(self) -> list[CachedRevisionInfo]:
        """Revisions sorted by commit."""
        repositories = () if self.scanned is None else self.scanned.repos
        found = (revision for repository in repositories for revision in repository.revisions)
        return sorted(found, key=lambda revision: revision.commit_hash)

    @property
    def locks(self) -> Path:
        """The directory of lock files (`ETAG.lock`) of downloads into this repository."""
        return self.path.parent / ".locks" / self.path.name


def hub_cache() -> Path:
    """The hub cache directory with links resolved; it may not exist."""
    check_settings()
    from huggingface_hub import constants  # 4 ms; knows all variables, older ones too

    return Path(os.path.realpath(Path(constants.HF_HUB_CACHE).expanduser()))


def read_hub_cache(root: Path) -> tuple[list[CachedRepository], int]:
    """The models in `root` by name, and the number of repositories that are not models.

    Never raises: a read error becomes the `problem` of its repository.
    """
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return [], 0
    paths = [root / name for name in names if name.startswith(PREFIX)]
    others = sum(name.startswith(_OTHERS) for name in names)
    return list(_repositories(root, paths)), others


def files_of(revision: CachedRevisionInfo) -> dict[str, CachedFileInfo]:
    """The files of a snapshot, sorted by their relative names."""
    found = {
        file.file_path.relative_to(revision.snapshot_path).as_posix(): file
        for file in revision.files
    }
    return dict(sorted(found.items()))


def on_disk(files: Iterable[CachedFileInfo]) -> int:
    """Bytes of the files; blobs shared by snapshots or caches are counted once."""
    return sum({os.path.realpath(file.blob_path): file.size_on_disk for file in files}.values())


def _repositories(root: Path, paths: Sequence[Path]) -> Iterator[CachedRepository]:
    """Scan all repositories at once, or one by one if this fails.

    `scan_cache_dir` raises for an unreadable file (nothing would be listed), takes an unreadable
    directory for an empty one, and hangs at a reference that is a pipe.
    """
    from huggingface_hub import scan_cache_dir

    problems = {path: problem for path in paths if (problem := _problem(path))}
    if paths and not problems:
        try:
            info = scan_cache_dir(root)
        except (OSError, ValueError):
            pass
        else:
            yield from (_repository(path, info, path.parent) for path in paths)
            return
    for path in paths:
        if path in problems:
            yield _unread(path, problems[path])
            continue
        try:
            with tempfile.TemporaryDirectory(prefix="llmcli-") as folder:
                view = Path(os.path.realpath(folder))
                (view / path.name).symlink_to(path)
                found = _repository(path, scan_cache_dir(view), view)
        except (OSError, ValueError) as error:
            found = _unread(path, why(error) if isinstance(error, OSError) else str(error))
        yield found


def _problem(repository: Path) -> str:
    """Describe a reference without a commit or an unreadable directory; empty if there is none."""
    for where, _, names in os.walk(repository / "refs"):
        for name in names:
            path = os.path.join(where, name)
            if not os.path.isfile(path) or os.path.getsize(path) > _LARGEST_REF:
                return f"the reference `{shown(name)}` is no file with a commit"
    unread: list[OSError] = []
    for _ in os.walk(repository / "snapshots", onerror=unread.append):
        pass
    return next((why(error) for error in unread if isinstance(error, PermissionError)), "")


def _repository(path: Path, info: HFCacheInfo, view: Path) -> CachedRepository:
    """The repository at `path` in a scan of `view`, the cache or a directory with a link to it."""
    seen = view / path.name
    for repository in info.repos:
        if repository.repo_path == seen:
            own = frozenset({_placed(repository, path)})
            scanned = replace(info, repos=own, cache_dir=path.parent)
            return CachedRepository(name=_name(path), path=path, scanned=scanned)
    if os.path.isdir(path) and not os.path.lexists(path / "snapshots"):
        return CachedRepository(name=_name(path), path=path)  # a download that has just begun
    ends = re.compile(re.escape(str(seen)) + r"(?![^/\s)])")
    said = next((str(one) for one in info.warnings if ends.search(str(one))), "it is unreadable")
    return _unread(path, said[:1].lower() + said[1:].replace(str(view), str(path.parent)))


def _unread(path: Path, problem: str) -> CachedRepository:
    return CachedRepository(name=_name(path), path=path, problem=shown(problem, 300))


def _name(path: Path) -> str:
    return path.name.removeprefix(PREFIX).replace("--", "/")


def _placed(repository: CachedRepoInfo, path: Path) -> CachedRepoInfo:
    """`repository` with its paths moved below `path`, without blobs outside of it.

    The library would delete any link's target; a link that leaves the repository counts as a file
    itself.
    """

    below, blobs = repository.repo_path, path / "blobs"

    def real(inner: Path) -> Path:
        moved = below != path and inner.is_relative_to(below)
        return path / inner.relative_to(below) if moved else inner

    def file(one: CachedFileInfo) -> CachedFileInfo:
        link, blob = real(one.file_path), real(one.blob_path)
        if blob != link and blob.parent != blobs:
            return replace(one, file_path=link, blob_path=link, size_on_disk=0)
        return one if below == path else replace(one, file_path=link, blob_path=blob)

    revisions = frozenset(
        replace(one, snapshot_path=real(one.snapshot_path), files=frozenset(map(file, one.files)))
        for one in repository.revisions
    )
    return replace(repository, repo_path=path, revisions=revisions)


# commits by unambiguous prefixes


def shortened(commit: str, commits: Collection[str]) -> str:
    """The shortest unambiguous prefix of `commit` in `commits`, at least `SHORT` digits."""
    digits = SHORT
    while digits < len(commit) and sum(one.startswith(commit[:digits]) for one in commits) > 1:
        digits += 1
    return commit[:digits]


def lengthened(revision: str, commits: Collection[str]) -> str:
    """The only commit with prefix `revision` (at least seven digits); otherwise `revision`."""
    if not _SOME_DIGITS.fullmatch(revision):
        return revision
    found = [commit for commit in commits if commit.startswith(revision)]
    return found[0] if len(found) == 1 else revision


def spelled_out(model: HubId) -> HubId:
    """`model` with a commit's prefix expanded to the full commit, if it is in the cache.

    A branch or tag of that name takes precedence. No network.
    """
    if model.revision is None or not _SOME_DIGITS.fullmatch(model.revision):
        return model
    folder = hub_cache() / (PREFIX + model.repository.replace("/", "--"))
    if (folder / "refs" / model.revision).exists():
        return model
    try:
        commits = os.listdir(folder / "snapshots")
    except OSError:
        return model
    return replace(model, revision=lengthened(model.revision, commits))
