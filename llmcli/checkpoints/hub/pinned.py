"""A file of the hub's that llmcli pins: in the hub's own cache, or downloaded into a scratch place.

It is kept by whoever verifies it, not in the hub's cache: the catalog's models are in one place,
whichever source they came from.
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
from llmcli.records.progress import Progress

_SECONDS = 3.0

Opened = Callable[[Path], AbstractContextManager[IO[bytes]]]


def kept(hub: HubFile) -> Path | None:
    """Where the hub's cache, which other tools fill too, has the file. No network."""
    check_settings()
    from huggingface_hub import try_to_load_from_cache  # 0.16 s

    found = try_to_load_from_cache(hub.repository, hub.file, revision=hub.revision)
    return Path(found) if isinstance(found, str) else None  # or a mark that it does not exist


def opened_file(path: Path) -> Opened:
    """The file at `path`, as a source."""

    @contextlib.contextmanager
    def opened(scratch: Path) -> Iterator[IO[bytes]]:
        with os.fdopen(open_regular(path)[0], "rb") as file:
            yield file

    return opened


def downloaded(hub: HubFile, size: int, sha256: str, doing: str, report: Progress) -> Opened:
    """A function of a scratch directory: the file, open, after a download from the hub.

    Nothing happens before it is called. It raises NetworkError within three seconds where the hub
    does not answer, for what it does not give to everybody too, ModelNotFound where it does not
    have the file, CheckpointError where that has another size or sha256.
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
        except WriteFailed as error:  # which is about the hub's cache, and this is ours
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
        cache_dir=folder,  # and from nowhere else: what the hub's own has was looked at before
        etag_timeout=_SECONDS,
        tqdm_class=bar(count),
    )


def _check_promise(hub: HubFile, size: int, sha256: str) -> None:
    """Asks the hub which file it would send, before anything large is sent."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(hub.repository, hub.file, revision=hub.revision)
    promise = get_hf_file_metadata(url, timeout=_SECONDS)
    etag = promise.etag or ""
    other = "size" if promise.size not in (None, size) else ""
    if SHA256.fullmatch(etag) and etag != sha256:  # of a file that is not large it is no sha256
        other = "sha256"
    if other:
        raise CheckpointError(f"the hub has another file as `{hub.file}`: its {other} differs")
