"""Fetches files of the hub into its cache: free space is checked, and large ones are verified."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmcli.checkpoints.files import is_full, put, shown
from llmcli.checkpoints.hub.bar import Counted, bar
from llmcli.checkpoints.hub.errors import unwritable
from llmcli.checkpoints.hub.files import TOKENIZERS
from llmcli.checkpoints.hub.listing import SHA256, Listing
from llmcli.checkpoints.hub.marks import emptied, marked, unverified
from llmcli.checkpoints.names import HubId
from llmcli.errors import CheckpointError
from llmcli.records.progress import Progress


def fetch_files(
    model: HubId, listing: Listing, names: Sequence[str], progress: Progress | None = None
) -> dict[str, Path]:
    """Fetches the missing ones of `names`, one after another: name -> path in the cache.

    What another fetch of ours left there before it was verified is verified now, or fetched again,
    as is what a power loss emptied.
    For use inside `explained`. Raises WriteFailed before anything is fetched where the cache has
    no room for it, CheckpointError for a file whose sha256 is not the one that the hub states.
    """
    from huggingface_hub import try_to_load_from_cache

    snapshot = snapshot_of(model, listing.commit)
    doubtful = unverified(snapshot)
    paths: dict[str, Path] = {}
    for name in names:
        found = try_to_load_from_cache(model.repository, name, revision=listing.commit)
        if isinstance(found, str) and emptied(Path(found)):
            Path(found).resolve().unlink()
            Path(found).unlink(missing_ok=True)
        elif isinstance(found, str):
            with contextlib.suppress(CheckpointError):  # it is gone now, and fetched below
                if name in doubtful:
                    with marked(snapshot, name):
                        _verify(name, Path(found), listing)
                paths[name] = Path(found)
    missing = [name for name in names if name not in paths]
    count = Counted(
        f"downloading {model.repository}", [listing.sizes[name] for name in missing], progress
    )
    _check_room(count.total)
    for name in missing:
        count.begin(listing.sizes[name])
        with marked(snapshot, name):
            paths[name] = _fetch(model, listing, name, count)
        count.end()
    return paths


def snapshot_of(model: HubId, commit: str) -> Path:
    """Where the hub's cache has, or will have, the files of `model` at that commit."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=model.repository, repo_type="model")
    return Path(constants.HF_HUB_CACHE).expanduser() / folder / "snapshots" / commit


def _fetch(model: HubId, listing: Listing, name: str, count: Counted) -> Path:
    """One file, verified. A fetch that is interrupted leaves no snapshot without files."""
    from huggingface_hub import hf_hub_download

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
    _verify(name, path, listing)
    _remove_left_overs(path.resolve())
    return path


def _remove_left_overs(blob: Path) -> None:
    """Stale partial downloads of the same file; those of a running one stay."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
    left = list(blob.parent.glob(f"{glob.escape(blob.name)}.*.incomplete"))
    if left:
        with contextlib.suppress(OSError), WeakFileLock(lock, timeout=0.1):
            for path in left:
                path.unlink(missing_ok=True)


def _check_room(needed: int) -> None:
    """WriteFailed where the cache's disk has less than `needed` bytes."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with contextlib.suppress(OSError):  # what is unknown is found out by writing
        if needed > shutil.disk_usage(folder).free:
            raise unwritable(None, room=needed)


def _verify(name: str, path: Path, listing: Listing) -> None:
    """Compares a file with what the hub states: its size, and its digest, which of a large one is
    its name in the cache.

    A wrong one is removed, so that nothing finds it. What the hub says nothing of passes.
    """
    blob = path.resolve()
    size = blob.stat().st_size
    other = "" if listing.sizes[name] in (None, size) else "size"
    expected, kind = listing.sha256.get(name), "sha256"
    if expected is None and SHA256.fullmatch(blob.name):
        expected = blob.name
    begun = hashlib.sha256()
    if expected is None:
        expected, kind = listing.git.get(name), "sha1"
        begun = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    if expected is not None and not other:
        with blob.open("rb") as file:
            other = "" if hashlib.file_digest(file, lambda: begun).hexdigest() == expected else kind
    if other:
        path.unlink(missing_ok=True)
        blob.unlink(missing_ok=True)
        raise CheckpointError(
            f"`{shown(name)}` came from the hub with another {other} than it has there, and "
            "was removed",
            hint="run the command again; if it stays so, something on the way changes files",
        )


def mark_missing(model: HubId, listing: Listing, small: Sequence[str]) -> None:
    """Lets the cache know what the repository does not have: a look-up then asks for it no more.

    The library keeps such marks itself, when a file turns out not to exist.
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
    """Writes which commit the branch or tag is, as the library would before a download.

    Afterwards, an interrupted update leaves the older version in use, which is whole.
    """
    revision = model.revision or "main"
    path = snapshot.parent.parent / "refs" / revision
    if revision == commit:
        return
    with contextlib.suppress(OSError):
        if path.is_file() and path.read_text() == commit:  # a pipe would never end
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    # beside `refs`, where whatever lies is a branch, also after a full disk or a kill
    with tempfile.TemporaryDirectory(dir=snapshot.parent.parent) as scratch:
        whole = Path(scratch) / "ref"
        whole.write_text(commit)
        put(whole, path)
