"""Looks up hub models in the shared hub cache, or downloads them, verified.

The huggingface_hub library resumes after a broken connection, renames complete files, and lets
concurrent processes fetch a file once. Its cache is documented at
https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli.checkpoints.files import is_full, put, shown, sync
from llmcli.checkpoints.folder import INDEX, SINGLE
from llmcli.checkpoints.hub.client import as_ours, explained, unwritable
from llmcli.checkpoints.hub.library import (
    check_settings,
    folder_of,
    has_odd_reference,
    hub_cache,
    spelled_out,
)
from llmcli.checkpoints.hub.listing import (
    BROKEN,
    COMPLETE,
    NO_WEIGHTS,
    SHA256,
    SMALL,
    TOKENIZERS,
    Listing,
    absent,
    choose,
    emptied,
    gguf_groups,
    listing_of,
    shards_of,
    state_of,
)
from llmcli.checkpoints.names import CLASSICS, HubId
from llmcli.checkpoints.split import part_names
from llmcli.errors import CheckpointError, ModelNotFound, NetworkError
from llmcli.records.work import Progress

# of the thread's download, see `_before_move`
_check: ContextVar[Callable[[Path, str], None] | None] = ContextVar("_check", default=None)


def cached(model: HubId, *, weights: bool = True, whole: bool = True) -> Path | None:
    """The snapshot directory or file of `model` if completely cached.

    No network. Without `weights` a tokenizer is enough. Without `whole` a runnable model is enough,
    even if a download could add files: other tools fetch weights without the tokenizer. Copies
    under a classic's old name (`gpt2`) count too. Raises ModelNotFound for an invalid id.
    """
    names = [model.repository, *(old for old, new in CLASSICS.items() if new == model.repository)]
    found = (_cached(replace(model, repository=name), weights, whole) for name in names)
    return next(filter(None, found), None)


def broken_link(model: HubId) -> str:
    """The name of a broken link of `model` in the cache; empty if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with suppress(HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        folder = Path(
            snapshot_download(model.repository, revision=model.revision, local_files_only=True)
        )
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() and not path.exists():
                return str(path.relative_to(folder))
    return ""


def _cached(model: HubId, weights: bool, whole: bool) -> Path | None:
    check_settings()
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # 0.16 s
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    _check_revision(model)
    model = spelled_out(model)
    if has_odd_reference(model):
        return None
    try:
        if model.file is not None:
            names = part_names(model.file) or (model.file,)
            found = [
                try_to_load_from_cache(model.repository, name, revision=model.revision)
                for name in names
            ]
            if not all(isinstance(one, str) for one in found):
                return None
            paths = [Path(str(one)) for one in found]
            return None if any(map(emptied, paths)) else paths[0]
        folder = snapshot_download(
            model.repository,
            revision=model.revision,
            local_files_only=True,
            # required files, compared only if the cache has a listing
            allow_patterns=list(SMALL) if whole else [SINGLE],
        )
        return _usable(Path(folder), weights, whole)
    except HFValidationError as error:
        raise as_ours(model, error) from None
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def _usable(folder: Path, weights: bool, whole: bool) -> Path | None:
    """The directory, or the GGUF file in it, if all needed files are present."""
    found = (path for path in folder.rglob("*") if path.is_file() and not emptied(path))
    names = {path.relative_to(folder).as_posix() for path in found}
    tensors = any(name.endswith(".safetensors") for name in names)
    if whole and (tensors or not weights) and any(emptied(folder / name) for name in SMALL):
        return None
    if not weights and not names.isdisjoint(TOKENIZERS):
        return folder
    state = state_of(names, folder / INDEX, absent(folder))
    if state == COMPLETE:
        return folder if tensors else folder / gguf_groups(names)[0][0]
    return None if whole or state in (BROKEN, NO_WEIGHTS) else folder


def download(model: HubId, *, weights: bool = True, progress: Progress | None = None) -> Path:
    """Fetch missing files of `model`; returns the snapshot directory or the (first) file.

    Without `weights` only the other files, unless the weights are a GGUF file. The branch or tag is
    pinned to its commit when all files are complete. `progress` counts bytes over all files. Raises
    errors of `explained` and `choose`, CheckpointError for a wrong sha256, and WriteFailed before
    any download if there is not enough space.
    """
    _check_revision(model)
    model = spelled_out(model)
    with explained(model):
        listing = listing_of(model)
        choice = choose(model, listing.sizes)
        large = choice.weights if weights or choice.lone else ()
        if weights and not choice.weights:  # the index lists the other files
            index = fetch_files(model, listing, (INDEX,))[INDEX]
            large = shards_of(index, listing.sizes)
        mark_missing(model, listing, choice.small)
        # weights last: if they are there, so is the rest
        paths = fetch_files(model, listing, (*choice.small, *large), progress)
        name, path = next(iter(paths.items()))
        folder = path.parents[name.count("/")]
        pin(model, listing.commit)
        return paths[large[0]] if choice.lone else folder


def _check_revision(model: HubId) -> None:
    """Raise ModelNotFound for `..` in a revision, which becomes a file name in the cache."""
    if model.revision is not None and ".." in model.revision:
        raise ModelNotFound(
            f"`{shown(model.revision)}` cannot be a revision",
            hint="a revision is a branch, a tag or a commit",
        )


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
            _remove(Path(found))
        elif isinstance(found, str):
            paths[name] = Path(found)
    sizes = {name: listing.sizes[name] for name in names if name not in paths}
    count = Counted(f"downloading {model.repository}", sizes.values(), progress)
    _check_room(count.total)
    for name, size in sizes.items():
        with count.file(size):
            paths[name] = _fetch(model, listing, name, count)
    return paths


def _fetch(model: HubId, listing: Listing, name: str, count: Counted) -> Path:
    """Fetch one file, verified before it has a name in the cache.

    An interrupted fetch leaves no empty snapshot.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    etag = listing.digests.get(name)
    if etag is None:
        url = hf_hub_url(model.repository, name, revision=listing.commit)
        etag = get_hf_file_metadata(url).etag or ""
    blob = folder_of(model) / "blobs" / etag
    if blob.is_file():  # of another commit, a killed process or another program
        with suppress(CheckpointError):
            _verify_or_remove(name, blob, etag, listing)
    drawn, sound, verified = bar(count, _check_room), blob.is_file(), False

    def verify(part: Path, etag: str) -> None:
        nonlocal verified
        _verify(name, part, etag, listing)
        verified = True

    try:
        with _before_move(verify):
            path = hf_hub_download(
                model.repository, name, revision=listing.commit, tqdm_class=drawn
            )
    except BaseException as error:
        with suppress(OSError):
            (folder_of(model) / "snapshots" / listing.commit).rmdir()
        if isinstance(error, OSError) and is_full(error):
            raise unwritable(error, room=count.total - count.done) from None
        raise
    for left in blob.parent.glob(f"{glob.escape(blob.name)}.*.incomplete"):  # of killed processes
        with suppress(OSError):
            left.unlink()
    if not verified and not (sound and blob.samefile(path)):
        _verify_or_remove(name, Path(path), etag, listing)
    return Path(path)


@contextlib.contextmanager
def _before_move(check: Callable[[Path, str], None]) -> Iterator[None]:
    """Call `check(part, etag)` for a received file before the library moves it into the cache.

    The file is synced then, too. Not called if the library has no such private function any more,
    nor for other threads' downloads.
    """
    _hook_moves()
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


@functools.cache
def _hook_moves() -> None:
    from huggingface_hub import file_download

    move: Any = getattr(file_download, "_chmod_and_move", None)

    def put(src: Path, dst: Path) -> None:
        if check := _check.get():
            check(src, dst.name)
            sync(src)
        move(src, dst)

    if move is not None:
        file_download._chmod_and_move = put


def _remove(path: Path) -> None:
    """Remove a file of the cache, and the bytes that it links to."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _check_room(needed: int) -> None:
    """Raise WriteFailed if the cache's disk has less than `needed` bytes."""
    folder = hub_cache()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with suppress(OSError):  # if unknown, writing will tell
        if needed > shutil.disk_usage(folder).free:
            raise unwritable(None, room=needed)


def _verify(name: str, path: Path, etag: str, listing: Listing) -> None:
    """Compare the file at `path` with the size and digest that the hub states.

    The ETag of a large file is its sha256. A file without stated size or digest passes. Raises
    CheckpointError; the caller removes the file.
    """
    size = path.stat().st_size
    other = "" if listing.sizes[name] in (None, size) else "size"
    expected = listing.digests.get(name) or (etag if SHA256.fullmatch(etag) else "")
    kind, begun = "sha256", hashlib.sha256()
    if expected and not SHA256.fullmatch(expected):
        kind, begun = "sha1", hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    if expected and not other:
        with path.open("rb") as file:
            other = "" if hashlib.file_digest(file, lambda: begun).hexdigest() == expected else kind
    if other:
        raise CheckpointError(
            f"the downloaded `{shown(name)}` has a wrong {other} and was removed",
            hint="run the command again; if it fails again, a proxy may change files",
        )


def _verify_or_remove(name: str, path: Path, etag: str, listing: Listing) -> None:
    try:
        _verify(name, path, etag, listing)
    except CheckpointError:
        _remove(path)
        raise


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
        with suppress(EntryNotFoundError):
            hf_hub_download(model.repository, name, revision=listing.commit)


def pin(model: HubId, commit: str) -> None:
    """Record the commit of a branch or tag, after the download.

    The library does so before; this way an interrupted update leaves the old, complete version in
    use.
    """
    revision = model.revision or "main"
    folder = folder_of(model)
    path = folder / "refs" / revision
    if revision == commit:
        return
    with suppress(OSError):
        if path.is_file() and path.read_text() == commit:  # a pipe would block
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    # not in `refs`, where a leftover would count as a branch
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch) / "ref"
        whole.write_text(commit)
        put(whole, path)


class Counted:
    """Bytes of a download of several files: `done` of `total`; `size` of the current file."""

    def __init__(self, what: str, sizes: Iterable[int | None], progress: Progress | None) -> None:
        self.total = sum(size or 0 for size in sizes)
        self.done = 0
        self._what, self._progress = what, progress
        self._before = 0
        self.size: int | None = None

    @contextlib.contextmanager
    def file(self, size: int | None) -> Iterator[None]:
        """Count the next file, of `size` bytes (None: unknown), inside the context."""
        self._before, self.size = self.done, size
        self.received(0)
        yield
        self.received(size or 0)

    def received(self, done: int) -> None:
        """Set the received bytes of the current file to `done`."""
        self.done = self._before + (min(done, self.size) if self.size else done)
        if self._progress is not None and self.total:
            self._progress(self._what, min(self.done, self.total), self.total)


def bar(count: Counted, check_room: Callable[[int], None] | None = None) -> Any:
    """A tqdm class for the library that counts and draws nothing.

    `check_room` is called with a file's remaining bytes before they are received: the hub may
    announce more than it lists.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        """Xet calls it from its own thread."""

        monitor_interval = 0  # no thread that redraws

        def __init__(self, *, total: int | None = None, initial: int = 0, **options: Any) -> None:
            super().__init__(disable=True)  # type: ignore[no-untyped-call]
            if total is None:
                raise NetworkError("the hub does not state the size of a file")
            self.total, self._done = int(total), int(initial)
            if count.size not in (None, self.total):
                raise CheckpointError(
                    f"the hub sends {self.total} bytes for a file listed with {count.size}",
                    hint="run the command again; if it fails again, a proxy may change files",
                )
            if check_room is not None:
                check_room(self.total - self._done)

        def update(self, amount: float | None = 1) -> None:
            """Count bytes before they are written; stops an endless body."""
            self._done += int(amount or 0)
            if self._done > self.total:
                raise CheckpointError("the hub sends more bytes than the file has")
            count.received(self._done)

        def update_transfer(self, amount: float) -> None:
            """Ignored: bytes on the wire, fewer than the file's."""

        def set_transfer_postfix_str(self, *args: Any, **options: Any) -> None:
            """Ignored: the speed."""

    return Bar
