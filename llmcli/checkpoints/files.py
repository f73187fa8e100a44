"""Opens untrusted files: regular files only, bounded sizes, clear errors."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import Any

from llmcli.errors import CheckpointError, ModelNotFound, as_lacking

_read: set[Path] = set()  # every model file that this process has opened
MAX_JSON_BYTES = 100_000_000  # the safetensors library's limit for its header


def shown(text: object, limit: int = 80) -> str:
    """`text` for a message: control characters escaped, cut after `limit` characters.

    Paths are not cut, because their end matters. Names in files are untrusted: unescaped ones could
    move the cursor or recolour the terminal.
    """
    if isinstance(text, Path):
        limit = 5000  # the longest path that Linux opens has 4096 bytes
    clean = "".join(
        char if char.isprintable() and char != "`" else char.encode("unicode_escape").decode()
        for char in str(text)[: limit + 1]
    )
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def listed(names: list[str]) -> str:
    """The first four file names, for a message."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"`{shown(name)}`" for name in names[:4]) + more


def why(error: OSError) -> str:
    """The operating system's reason, in lower case without the path."""
    reason = error.strerror or type(error).__name__
    return reason[:1].lower() + reason[1:]


def put(part: Path, path: Path, mode: int | None = None) -> None:
    """Rename the finished file `part` to `path`, atomically even across a power loss.

    The contents are synced before the rename. `mode`: permissions (None: unchanged). Raises
    OSError.
    """
    if mode is not None:
        os.chmod(part, mode)
    sync(part)
    os.replace(part, path)
    with contextlib.suppress(OSError):  # unreadable, or cannot be synced
        sync(path.parent)


def sync(path: Path) -> None:
    """Sync the file or directory `path` to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file for reading; returns (file descriptor, size in bytes).

    Raises ModelNotFound if it does not exist, CheckpointError for directories, pipes, devices,
    sockets, empty files and unreadable files. Never blocks: a FIFO without a writer would hang an
    ordinary open.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise ModelNotFound(
                f"`{shown(path)}` is a broken link: the file that it points to is gone",
                hint="fetch or copy it again",
            ) from None
        raise ModelNotFound(f"there is no file `{shown(path)}`", hint="check the path") from None
    except (OSError, ValueError) as error:
        cause = why(error) if isinstance(error, OSError) else "the name holds a NUL byte"
        known = as_lacking(error)
        raise known or CheckpointError(f"`{shown(path)}` cannot be read: {cause}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"`{shown(path)}` is not a regular file")
        if status.st_size == 0:
            raise CheckpointError(f"`{shown(path)}` is empty", hint="fetch or copy the file again")
    except BaseException:
        os.close(descriptor)
        raise
    _read.add(path)
    return descriptor, status.st_size


def was_read(status: os.stat_result) -> bool:
    """Whether this process has opened the file as a model file, under any name."""
    for path in _read:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), status):
                return True
    return False


def read_bytes(path: Path, most: int) -> bytes:
    """The contents of `path`; CheckpointError if it has more than `most` bytes."""
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if size > most:
            raise CheckpointError(f"`{path.name}` has more than {most} bytes")
        return file.read(size)


def read_json(path: Path) -> Any:
    """The JSON document in `path`, or CheckpointError.

    NaN and Infinity are accepted, since the reference implementation writes them into `config.json`
    (`time_step_limit` of Mamba-2).
    """
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"`{shown(path)}` is larger than {MAX_JSON_BYTES} bytes")
        try:
            return json.loads(file.read(size).decode("utf-8-sig"))
        except OSError as error:
            raise CheckpointError(f"`{shown(path)}` cannot be read: {why(error)}") from None
        except RecursionError:
            cause = "it is nested too deeply"
        except UnicodeDecodeError:
            cause = "it is not utf-8 text"
        except ValueError as error:
            cause = shown(error)
    raise CheckpointError(f"`{shown(path)}` is not valid json: {cause}")


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None if the file does not exist. Raises CheckpointError."""
    if not os.path.lexists(path):
        return None
    try:
        document = read_json(path)
    except ModelNotFound:
        raise CheckpointError(f"`{shown(path)}` is a broken link") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"`{shown(path)}` is not a json object")
    return document


class WeightFile:
    """A weight file: a shared read-only mapping and plain reads of the same bytes.

    Opened on first use. `size` is the size at the header check: a file that has another size by
    then was replaced or truncated, and mapping it could crash the process.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._descriptor = -1
        self._close: weakref.finalize[..., WeightFile] | None = None
        self._map: mmap.mmap | None = None

    def _open(self) -> int:
        if self._descriptor < 0:
            descriptor, size = open_regular(self.path)
            if size != self.size:
                os.close(descriptor)
                raise CheckpointError(f"`{shown(self.path)}` has changed since it was opened")
            self._descriptor = descriptor
            self._close = weakref.finalize(self, os.close, descriptor)
        return self._descriptor

    @property
    def descriptor(self) -> int:
        """The file descriptor, valid until `release`. Raises CheckpointError for a changed file."""
        return self._open()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Zero-copy view of `nbytes` bytes at `offset`; the mapping lives as long as any view."""
        if self._map is None:
            try:
                self._map = mmap.mmap(self._open(), self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"`{shown(self.path)}` cannot be mapped: {error}") from None
        return memoryview(self._map)[offset : offset + nbytes]

    def read(self, offset: int, nbytes: int) -> bytearray:
        """A copy of `nbytes` bytes at `offset`, read without the mapping."""
        data, descriptor, done = bytearray(nbytes), self._open(), 0
        while done < nbytes:  # one call returns at most 2 GiB
            try:
                count = os.preadv(descriptor, [memoryview(data)[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"`{shown(self.path)}` cannot be read: {why(error)}"
                ) from None
            if not count:
                raise CheckpointError(f"`{shown(self.path)}` ends early: it was truncated")
            done += count
        return data

    def release(self) -> None:
        """Release the mapped pages and close the file; existing views stay valid."""
        if self._map is not None:
            if hasattr(mmap, "MADV_DONTNEED"):
                self._map.madvise(mmap.MADV_DONTNEED)
            try:
                self._map.close()
                self._map = None
            except BufferError:  # a view is in use: keep the mapping; its pages are released
                pass
        if self._close is not None:
            self._close()
            self._close, self._descriptor = None, -1


def is_full(error: OSError) -> bool:
    """Whether a write failed for lack of space."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
