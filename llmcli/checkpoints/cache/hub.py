"""The models in the Hugging Face cache, as huggingface_hub's `scan_cache_dir` lists them.

No network. The library is imported to list: looking up one commit takes its constants alone.
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
SHORT = 12  # digits of a commit that a list shows, which no other begins with
_OTHERS = ("datasets--", "spaces--", "kernels--")
_SOME_DIGITS = re.compile(r"[0-9a-f]{7,39}")
_LARGEST_REF = 4096  # bytes; a reference holds a commit, 40 digits


@dataclass(frozen=True, kw_only=True)
class CachedRepository:
    """A model's repository: what the library `scanned`, of this repository alone.

    None where it has no snapshots, or could not be read: `problem` says why.
    """

    name: str
    path: Path
    scanned: HFCacheInfo | None = None
    problem: str = ""

    @property
    def revisions(self) -> list[CachedRevisionInfo]:
        """By commit."""
        repositories = () if self.scanned is None else self.scanned.repos
        found = (revision for repository in repositories for revision in repository.revisions)
        return sorted(found, key=lambda revision: revision.commit_hash)

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
    paths = [root / name for name in names if name.startswith(PREFIX)]
    others = sum(name.startswith(_OTHERS) for name in names)
    return list(_repositories(root, paths)), others


def files_of(revision: CachedRevisionInfo) -> dict[str, CachedFileInfo]:
    """The files of a snapshot by their names within it, sorted."""
    found = {
        file.file_path.relative_to(revision.snapshot_path).as_posix(): file
        for file in revision.files
    }
    return dict(sorted(found.items()))


def on_disk(files: Iterable[CachedFileInfo]) -> int:
    """Bytes of the files, each blob counted once however many snapshots and stores share it."""
    return sum({os.path.realpath(file.blob_path): file.size_on_disk for file in files}.values())


def _repositories(root: Path, paths: Sequence[Path]) -> Iterator[CachedRepository]:
    """A repository each, by one scan; where that fails because of one of them, by a scan each.

    `scan_cache_dir` raises at a file that it may not read, so that nothing would be listed, takes
    a directory that it may not read for an empty one, and waits for ever for a reference that is a
    pipe.
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
    """A reference that is no file with a commit, or a directory that may not be read."""
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
    """What a scan of `view`, the cache or a directory with a link to `path`, found of it."""
    seen = view / path.name
    for repository in info.repos:
        if repository.repo_path == seen:
            own = frozenset({_placed(repository, path)})
            scanned = replace(info, repos=own, cache_dir=path.parent)
            return CachedRepository(name=_name(path), path=path, scanned=scanned)
    if os.path.isdir(path) and not os.path.lexists(path / "snapshots"):
        return CachedRepository(name=_name(path), path=path)  # a download that only began
    ends = re.compile(re.escape(str(seen)) + r"(?![^/\s)])")
    said = next((str(one) for one in info.warnings if ends.search(str(one))), "it is unreadable")
    return _unread(path, said[:1].lower() + said[1:].replace(str(view), str(path.parent)))


def _unread(path: Path, problem: str) -> CachedRepository:
    return CachedRepository(name=_name(path), path=path, problem=shown(problem, 300))


def _name(path: Path) -> str:
    return path.name.removeprefix(PREFIX).replace("--", "/")


def _placed(repository: CachedRepoInfo, path: Path) -> CachedRepoInfo:
    """`repository` with its paths below `path`, and no blob outside of it.

    The library would delete whatever a link of a snapshot leads to; a link that leads out of the
    repository stands for itself alone.
    """

    def real(inner: Path) -> Path:
        below = repository.repo_path
        return path / inner.relative_to(below) if inner.is_relative_to(below) else inner

    def file(one: CachedFileInfo) -> CachedFileInfo:
        link, blob = real(one.file_path), real(one.blob_path)
        outside = blob not in (link, path / "blobs" / blob.name)
        return replace(
            one, file_path=link, blob_path=link if outside else blob,
            size_on_disk=0 if outside else one.size_on_disk,
        )  # fmt: skip

    revisions = frozenset(
        replace(one, snapshot_path=real(one.snapshot_path), files=frozenset(map(file, one.files)))
        for one in repository.revisions
    )
    return replace(repository, repo_path=path, revisions=revisions)


# commits by their first digits, where no other in the cache begins with them


def shortened(commit: str, commits: Collection[str]) -> str:
    """As few digits of `commit` as no other of `commits` begins with, at least `SHORT`."""
    digits = SHORT
    while digits < len(commit) and sum(one.startswith(commit[:digits]) for one in commits) > 1:
        digits += 1
    return commit[:digits]


def lengthened(revision: str, commits: Collection[str]) -> str:
    """The one of `commits` that begins with `revision`, if that has seven digits; else itself."""
    if not _SOME_DIGITS.fullmatch(revision):
        return revision
    found = [commit for commit in commits if commit.startswith(revision)]
    return found[0] if len(found) == 1 else revision


def spelled_out(model: HubId) -> HubId:
    """`model` with its whole commit where the first digits are given and the cache has that one.

    A branch or tag of that name goes first. No network.
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
