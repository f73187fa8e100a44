"""A pinned file of the hub: from the hub cache, or downloaded into a scratch directory.

The caller verifies and stores it in llmcli's cache, like catalog models of other sources.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from llmcli.checkpoints.catalog import HubFile
from llmcli.checkpoints.files import open_regular
from llmcli.checkpoints.hub.library import check_settings
from llmcli.checkpoints.hub.listing import SHA256
from llmcli.checkpoints.names import HubId
from llmcli.errors import CheckpointError, NetworkError, WriteFailed
from llmcli.records.work import Progress

_SECONDS = 3.0

Opened = Callable[[Path], AbstractContextManager[IO[bytes]]]


def kept(hub: HubFile) -> Path | None:
    """The path of the file in the hub cache; None if missing. No network."""
    check_settings()
    from huggingface_hub import try_to_load_from_cache  # 0.16 s

    found = try_to_load_from_cache(hub.repository, hub.file, revision=hub.revision)
    return Path(found) if isinstance(found, str) else None  # or a mark of a missing file


def opened_file(path: Path) -> Opened:
    """A source that opens the file at `path`."""

    @contextlib.contextmanager
    def opened(scratch: Path) -> Iterator[IO[bytes]]:
        with os.fdopen(open_regular(path)[0], "rb") as file:
            yield file

    return opened


def downloaded(hub: HubFile, size: int, sha256: str, doing: str, report: Progress) -> Opened:
    """A source that downloads the file from the hub into a scratch directory and opens it.

    It raises NetworkError within three seconds if the hub does not answer, also for restricted
    files, ModelNotFound for a missing file, CheckpointError for a wrong size or sha256.
    """

    @contextlib.contextmanager
    def opened(scratch: Path) -> Iterator[IO[bytes]]:
        from llmcli.checkpoints.hub.calls import explained, reachable

        if not reachable():
            raise NetworkError("the hub cannot be reached")
        try:
            with explained(HubId(repository=hub.repository, file=hub.file)):
                _check_promise(hub, size, sha256)
                path = _download(hub, size, scratch / "hub", doing, report)
        except WriteFailed as error:  # refers to the hub cache, but this is our cache
            cause = error.__context__
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise cause if isinstance(cause, OSError) else full from None
        with open(path, "rb") as file:
            yield file

    return opened


def _download(hub: HubFile, size: int, folder: Path, doing: str, report: Progress) -> str:
    from huggingface_hub import hf_hub_download

    from llmcli.checkpoints.hub.bar import Counted, bar

    count = Counted(doing, [size], report)
    count.begin(size)
    return hf_hub_download(
        hub.repository,
        hub.file,
        revision=hub.revision,
        local_dir=folder,
        cache_dir=folder,  # the hub cache was checked before
        etag_timeout=_SECONDS,
        tqdm_class=bar(count),
    )


def _check_promise(hub: HubFile, size: int, sha256: str) -> None:
    """Check the size and sha256 that the hub announces, before the download."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(hub.repository, hub.file, revision=hub.revision)
    promise = get_hf_file_metadata(url, timeout=_SECONDS)
    etag = promise.etag or ""
    other = "size" if promise.size not in (None, size) else ""
    if SHA256.fullmatch(etag) and etag != sha256:  # small files have no sha256 as ETag
        other = "sha256"
    if other:
        raise CheckpointError(f"`{hub.file}` on the hub is a different file: its {other} differs")
