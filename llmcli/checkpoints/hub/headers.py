"""Fetches the headers of a model on the hub, without its weights."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmcli.checkpoints.catalog import CatalogEntry, named
from llmcli.checkpoints.files import MAX_JSON_BYTES, shown, why
from llmcli.checkpoints.folder import INDEX
from llmcli.checkpoints.gguf import read_gguf
from llmcli.checkpoints.hub.client import bytes_of, explained
from llmcli.checkpoints.hub.download import cached, fetch_files, pin
from llmcli.checkpoints.hub.listing import Listing, choose, listing_of, shards_of
from llmcli.checkpoints.names import HubId
from llmcli.errors import CheckpointError, LlmcliError, WriteFailed
from llmcli.records.work import Progress

_FIRST = 100_000  # first bytes of a safetensors file; most headers are shorter
_MAX_FILE = 1 << 43  # bytes; 100 × the hub's largest files
_FIRST_GGUF = 1 << 20  # its header holds the vocabulary
_MAX_GGUF = 1 << 28  # the largest vocabularies take 20 MB


def on_the_hub(spec: str, revision: str | None) -> HubId | None:
    """The hub repository or file that `spec` names; None for anything else.

    Also None for a catalog model that is in our cache, or that has a source besides the hub.
    """
    found = named(spec, revision)
    if isinstance(found, CatalogEntry) and found.wheel is None and not found.is_cached():
        return found.hub
    return found if isinstance(found, HubId) else None


@contextlib.contextmanager
def fetched_headers(
    model: HubId, *, weights: bool = True, progress: Progress | None = None
) -> Iterator[tuple[Path, str]]:
    """Yield a temporary directory with small files and weight headers, and the commit.

    For a GGUF model the (first) file in it. Weight files have their full size; after the first
    bytes, with the header, they are sparse and read as zeros. Without `weights` they are omitted,
    except GGUF files, which hold the tokenizer. Raises errors of `explained` and `choose`.
    """
    with _scratch(f"hf:{model.repository}") as target:
        with explained(model):
            listing = listing_of(model)
            choice = choose(model, listing.sizes)
            small = tuple(name for name in choice.small if weights or name != INDEX)
            _link_small(model, small, listing, target, progress)
            names = choice.weights if weights or choice.lone else ()
            if weights and not names:
                names = shards_of(target / INDEX, listing.sizes)
            linked = small and (target / small[0]).is_symlink()
            if linked and (not weights or cached(model, whole=False) is None):  # already cached
                pin(model, listing.commit)
            for number, name in enumerate(names):
                if progress is not None:
                    progress(f"reading the headers of {model.repository}", number, len(names))
                _write_header(model, name, listing, target / name)
        yield target / names[0] if choice.lone else target, listing.commit


@contextlib.contextmanager
def _scratch(alias: str) -> Iterator[Path]:
    """A temporary directory, which error messages call `alias`, except if it cannot be written."""
    try:
        made = tempfile.TemporaryDirectory(prefix="llmcli-headers-")
    except OSError as error:
        raise WriteFailed(
            f"no temporary directory can be made: {why(error)}",
            hint="set TMPDIR to a directory that can be written",
        ) from None
    with made as folder:
        try:
            yield Path(folder)
        except WriteFailed:
            raise
        except LlmcliError as error:
            error.message = error.message.replace(folder, alias)
            raise


def _link_small(
    model: HubId, names: Sequence[str], listing: Listing, folder: Path, progress: Progress | None
) -> None:
    """Fetch small files, into the shared hub cache if it is writable."""
    for name in names:
        if (listing.sizes[name] or 0) > MAX_JSON_BYTES:
            raise CheckpointError(f"`{shown(name)}` is larger than {MAX_JSON_BYTES} bytes")
    try:
        with explained(model):
            kept = fetch_files(model, listing, names, progress)
    except WriteFailed:
        for name in names:
            data = bytes_of(model, name, listing.commit, 0, MAX_JSON_BYTES)
            _put(folder / name, 0, data, len(data))
    else:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(kept[name])


def _put(target: Path, at: int, data: bytes, size: int | None) -> None:
    """Write `data` at offset `at`; the file is sparse up to `size`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            os.truncate(target, at)
            file.write(data)
        if size is not None:
            os.truncate(target, size)
    except (OSError, OverflowError) as error:
        cause = why(error) if isinstance(error, OSError) else f"{size} bytes are too many"
        raise WriteFailed(
            f"`{shown(target.parent)}` cannot be written: {cause}",
            hint="set TMPDIR to another directory",
        ) from None


def _write_header(model: HubId, name: str, listing: Listing, target: Path) -> None:
    """Write the beginning of a weight file with its whole header; the rest is sparse.

    A broken header is refused when it is opened.
    """
    size, gguf = listing.sizes[name], name.lower().endswith(".gguf")
    if (size or 0) > _MAX_FILE:
        raise CheckpointError(
            f"the hub states an impossible size of `{shown(name)}`: {size} bytes",
            hint="look for another repository with the same model",
        )
    _put(target, 0, b"", size)
    have, want = 0, _FIRST_GGUF if gguf else _FIRST
    while have < want and have != size:
        data = bytes_of(model, name, listing.commit, have, want)
        _put(target, have, data, size)
        have += len(data)
        if have < want:  # the file ends
            return
        want = _wanted_of_gguf(target, have) if gguf else _header_bytes(target)


def _header_bytes(target: Path) -> int:
    """Bytes of a safetensors file up to the end of its header; 0 if it is too long."""
    with target.open("rb") as file:
        length = 8 + int(struct.unpack("<Q", file.read(8))[0])
    return length if length <= MAX_JSON_BYTES else 0


def _wanted_of_gguf(target: Path, have: int) -> int:
    """`have` bytes if they hold the GGUF header, which does not state its length; else 4 × as many.

    It is complete if it parses and its weights begin within the fetched bytes: the zeros after
    these are no valid header.
    """
    try:
        tensors = read_gguf(target)[1]
    except CheckpointError:
        whole = False
    else:
        whole = bool(tensors) and min(one.offset for one in tensors.values()) <= have
    return have if whole or have >= _MAX_GGUF else 4 * have
