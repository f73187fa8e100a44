"""Fetches hub files into the hub cache; checks free space and verifies digests."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmcli.checkpoints.files import is_full, put, shown
from llmcli.checkpoints.hub.bar import Counted, bar
from llmcli.checkpoints.hub.calls import before_move
from llmcli.checkpoints.hub.errors import unwritable
from llmcli.checkpoints.hub.files import TOKENIZERS, emptied
from llmcli.checkpoints.hub.listing import SHA256, Listing
from llmcli.checkpoints.names import HubId
from llmcli.errors import CheckpointError
from llmcli.records.work import Progress


def fetch_files(
    model: HubId, listing: Listing, names: Sequence[str], progress: Progress | None = None
) -> dict[str, Path]:
    """Fetch missing files in `names` one by one; returns name -> path in the cache.

    Files emptied by a power loss are fetched again. For use inside `explained`. Raises WriteFailed
    before any download if there is not enough space, CheckpointError for a wrong digest.
    """
    from huggingface_hub import try_to_load_from_cache

    paths: dict[str, Path] = {}
    for name in names:
        found = try_to_load_from_cache(model.repository, name, revision=listing.commit)
        if isinstance(found, str) and emptied(Path(found)):
            Path(found).resolve().unlink()
            Path(found).unlink(missing_ok=True)
        elif isinstance(found, str):
            paths[name] = Path(found)
    missing = [name for name in names if name not in paths]
    count = Counted(
        f"downloading {model.repository}", [listing.sizes[name] for name in missing], progress
    )
    _check_room(count.total)
    for name in missing:
        count.begin(listing.sizes[name])
        paths[name] = _fetch(model, listing, name, count)
        count.file(listing.sizes[name] or 0)
    return paths


def snapshot_of(model: HubId, commit: str) -> Path:
    """The directory in the hub cache for the files of `model` at `commit`."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=model.repository, repo_type="model")
    return Path(constants.HF_HUB_CACHE).expanduser() / folder / "snapshots" / commit


def _fetch(model: HubId, listing: Listing, name: str, count: Counted) -> Path:
    """Fetch one file, verified before it has a name in the cache.

    An interrupted fetch leaves no empty snapshot.
    """
    from huggingface_hub import hf_hub_download

    verified = []

    def verify(part: Path, blob: Path) -> None:
        _verify(name, part, blob.name, listing)
        verified.append(part)

    token = before_move.set(verify)
    try:
        drawn = bar(count, _check_room)
        path = Path(
            hf_hub_download(model.repository, name, revision=listing.commit, tqdm_class=drawn)
        )
    except BaseException as error:
        with contextlib.suppress(OSError):
            snapshot_of(model, listing.commit).rmdir()
        if isinstance(error, OSError) and is_full(error):
            raise unwritable(error, room=count.total - count.done) from None
        raise
    finally:
        before_move.reset(token)
    blob = _blob_of(path)
    if not verified:  # nothing was moved: a blob that was in the cache without a snapshot
        try:
            _verify(name, path, blob.name, listing)
        except CheckpointError:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise
    _remove_left_overs(blob)
    return path


def _blob_of(path: Path) -> Path:
    """The blob that a file of a snapshot links to; the file itself if it is none.

    Its name is the ETag. It may be a link too, into the store that repositories share.
    """
    if not path.is_symlink():
        return path
    return Path(os.path.normpath(path.parent.resolve() / path.readlink()))


def _remove_left_overs(blob: Path) -> None:
    """Remove stale partial downloads of the same file; a running download's stay."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
    left = list(blob.parent.glob(f"{glob.escape(blob.name)}.*.incomplete"))
    if left:
        with contextlib.suppress(OSError), WeakFileLock(lock, timeout=0.1):
            for path in left:
                path.unlink(missing_ok=True)


def _check_room(needed: int) -> None:
    """Raise WriteFailed if the cache's disk has less than `needed` bytes."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with contextlib.suppress(OSError):  # if unknown, writing will tell
        if needed > shutil.disk_usage(folder).free:
            raise unwritable(None, room=needed)


def _verify(name: str, path: Path, etag: str, listing: Listing) -> None:
    """Compare the file at `path` with the size and digest that the hub states.

    The ETag of a large file is its sha256. A file without stated size or digest passes. Raises
    CheckpointError; the caller removes the file.
    """
    size = path.stat().st_size
    other = "" if listing.sizes[name] in (None, size) else "size"
    expected, kind = listing.sha256.get(name), "sha256"
    if expected is None and SHA256.fullmatch(etag):
        expected = etag
    begun = hashlib.sha256()
    if expected is None:
        expected, kind = listing.git.get(name), "sha1"
        begun = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    if expected is not None and not other:
        with path.open("rb") as file:
            other = "" if hashlib.file_digest(file, lambda: begun).hexdigest() == expected else kind
    if other:
        raise CheckpointError(
            f"the downloaded `{shown(name)}` has a wrong {other} and was removed",
            hint="run the command again; if it fails again, a proxy may change files",
        )


def mark_missing(model: HubId, listing: Listing, small: Sequence[str]) -> None:
    """Record files that the repository lacks, so that lookups do not request them again.

    The library creates the same marks when a file does not exist.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    if model.file is not None or not small:
        return
    absent = [] if "config.json" in small else ["config.json"]
    absent += [] if set(small) & set(TOKENIZERS) else [TOKENIZERS[0]]
    for name in absent:
        with contextlib.suppress(EntryNotFoundError):
            hf_hub_download(model.repository, name, revision=listing.commit)


def pin(model: HubId, commit: str, snapshot: Path) -> None:
    """Record the commit of a branch or tag, after the download.

    The library does so before; this way an interrupted update leaves the old, complete version in
    use.
    """
    revision = model.revision or "main"
    path = snapshot.parent.parent / "refs" / revision
    if revision == commit:
        return
    with contextlib.suppress(OSError):
        if path.is_file() and path.read_text() == commit:  # a pipe would block
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    # not in `refs`, where a leftover would count as a branch
    with tempfile.TemporaryDirectory(dir=snapshot.parent.parent) as scratch:
        whole = Path(scratch) / "ref"
        whole.write_text(commit)
        put(whole, path)
