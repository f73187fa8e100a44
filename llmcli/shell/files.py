"""Files that a command writes because the user asked for one: which kind, how large, and whole.

A file appears under its name only when it is complete: until then it grows beside it under
another name. A full disk, Ctrl-C or a power loss costs nothing, and what was there before stays.
A process that is killed leaves its partial file, which the next write into that directory removes:
the writer holds a lock on it, which ends with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import io
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from llmcli.errors import UsageError, WriteFailed
from llmcli.records.numbers import did_you_mean, either

# bytes above which `--force` is needed; a browser reads a page as a whole
PAGE_CAP = 64 << 20
FILE_CAP = 1 << 30
OPENING_S = 3.0  # within that xdg-open says that it opens nothing
OTHER_PLACE = "write to another file or directory"
_PARTIAL = re.compile(r"\.llmcli-[0-9a-f]{12}\.part")


def kind_of_file(path: str, allowed: Sequence[str], *, option: str = "-o") -> str:
    """`png` for `out.png`: the ending, in small letters, which says what is written.

    Called before anything is computed. Raises UsageError for an ending that is not among
    `allowed` (`("png", "json")`), and WriteFailed where there is no such directory.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in allowed:
        listed = either([f".{ending}" for ending in allowed])
        near = get_close_matches(kind, allowed, 1, 0.5) if kind else []
        name = f"{Path(path).stem.lstrip('.-') or 'out'}.{(near or allowed)[0]}"
        example = f"{option} {Path(path).with_name(name) if Path(path).name else name}"
        raise UsageError(
            f"unsupported file type in `{option} {path}`: use {listed}",
            hint=did_you_mean([example] if near else (), f"such as `{example}`"),
        )
    check_place(path)
    return kind


def check_place(path: str) -> None:
    """Raises WriteFailed where the file could not be: no directory, write-protected."""
    with _write_errors(path):
        target = _target(path)
        if target.is_dir():
            name = target.with_name("out" + target.suffix).name
            raise WriteFailed(
                f"could not write `{path}`: it is a directory",
                hint=f"name a file in it, such as `{path.rstrip('/')}/{name}`",
            )
        folder = target.parent
        try:
            folder.stat()
        except FileNotFoundError:
            raise WriteFailed(
                f"could not write `{path}`: there is no such directory",
                hint=f"make it first: mkdir -p {shlex.quote(str(folder))}",
            ) from None
        check_target(path)
        # a file is written beside its old self, a pipe or a device as it is
        if not os.access(target if _stream(target) else folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def check_target(path: str) -> None:
    """Raises WriteFailed for a file that is write-protected, or that the model is read from.

    `whole_file` asks; a command that computes for long asks first, with its model loaded.
    """
    from llmcli.checkpoints.files import was_read

    with _write_errors(path):
        try:
            status = _target(path).stat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode):
            return
        # The directory's permissions decide about a rename, and root may write anything.
        if not (status.st_mode & 0o222 and os.access(_target(path), os.W_OK)):
            raise WriteFailed(f"could not write `{path}`: it is write-protected", hint=OTHER_PLACE)
        if was_read(status):
            raise WriteFailed(
                f"could not write `{path}`: it is a file of the model that is being read",
                hint=OTHER_PLACE,
            )


def check_size(path: str, estimate: int, *, force: bool, smaller: str) -> None:
    """Refuses a file of about `estimate` bytes where that is too much.

    `smaller` says how to get less: "name fewer layers with `--layer`". Raises UsageError above
    the cap (64 MiB for a page, 1 GiB for anything else) without `force`, and WriteFailed where
    the disk has no room for it, and as `check_target` does.
    """
    from llmcli.ui.numbers import size

    check_target(path)
    page = path.lower().endswith(".html")
    check_cap(f"`{path}`", estimate, force=force, smaller=smaller, page=page)
    target = _target(path)
    if _stream(target):
        return
    with contextlib.suppress(OSError):  # a file system that does not say
        disk = shutil.disk_usage(target.parent)
        if disk.total and estimate > disk.free:  # none at all: it keeps no files of its own
            raise WriteFailed(
                f"could not write `{path}`: it would take about {size(estimate)} and the disk has "
                f"{size(disk.free)} free",
                hint=f"{smaller}, or write to another disk",
            )


def check_cap(what: str, estimate: int, *, force: bool, smaller: str, page: bool = False) -> None:
    """Raises UsageError where about `estimate` bytes are above the cap, without `force`."""
    from llmcli.ui.numbers import size

    cap = PAGE_CAP if page else FILE_CAP
    if estimate > cap and not force:
        raise UsageError(
            f"{what} would take about {size(estimate)}, more than {size(cap)}",
            hint=f"{smaller}, or add --force",
        )


def page_to_open(command: str) -> str:
    """The path of a page that is only viewed: in a new directory, which others cannot read.

    The page stays, for the browser reads it later; without one the directory goes with the process.
    """
    from tempfile import mkdtemp

    folder = mkdtemp(prefix=f"llmcli-{command}-")

    def remove_empty() -> None:
        with contextlib.suppress(OSError):
            os.rmdir(folder)

    atexit.register(remove_empty)
    return os.path.join(folder, f"{command}.html")


def open_file(path: str) -> str:
    """Shows a file in the desktop's program for it; returns a note if there is none."""
    if launch(path) == 0:
        return ""
    viewer = "browser" if path.lower().endswith(".html") else "image viewer"
    return f"no {viewer} could be started: `{path}` is written, open it yourself"


def launch(path: str) -> int:
    """The exit code of the desktop's opener, 0 where it still runs after a while, 127 without one.

    `typer.launch` does not wait, and so does not see that nothing was opened: on a server without
    a desktop xdg-open fails after a second, with a list of browsers that are not there.
    """
    opener = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if opener is None:
        return 127
    quiet = subprocess.DEVNULL
    command = [opener, os.path.abspath(path)]
    child = subprocess.Popen(
        command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        return child.wait(OPENING_S)
    except subprocess.TimeoutExpired:  # it is the browser itself
        return 0


def written(path: str, holds: str) -> str:
    """The line that reports a written file: its size and content (`holds`)."""
    from llmcli.ui.numbers import size

    target = _target(path)
    taken = f" ({size(target.stat().st_size)})" if target.is_file() else ""  # a pipe has no size
    return f"wrote `{path}`{taken}: {holds}"


@contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
    """An open file, empty and seekable, which becomes `path` when the block ends well.

    After an exception nothing is left of it. A pipe or a device is given all of it at the end.
    Raises WriteFailed, with the system's reason, for any error of the file, inside the block too;
    other exceptions pass through.
    """
    from tempfile import TemporaryDirectory

    from llmcli.checkpoints.files import put

    target = _target(path)
    if _stream(target):
        with _write_errors(path):
            folder = TemporaryDirectory()
        with folder as name, _opened(path, Path(name, "whole"), "xb+") as file:
            yield file
            file.seek(0)
            with _opened(path, target, "wb") as stream:
                shutil.copyfileobj(file, stream)
        return
    check_target(path)
    _remove_stale(target.parent)
    with _write_errors(path):
        beside, lock = _partial(target.parent)
    try:
        with _opened(path, beside, "rb+") as file:
            yield file
        with _write_errors(path):
            mode = target.stat().st_mode & 0o7777 if target.exists() else None
            put(beside, target, mode)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        os.close(lock)


def _partial(folder: Path) -> tuple[Path, int]:
    """A new empty file in `folder`, and a descriptor that locks it until it is closed."""
    while True:
        path = folder / f".llmcli-{os.urandom(6).hex()}.part"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks: nothing is removed there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)  # another process removed it before it was locked


def _remove_stale(folder: Path) -> None:
    """Removes partial files whose writers are gone: no process holds the lock on them."""
    with contextlib.suppress(OSError):
        for name in filter(_PARTIAL.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                file = os.open(folder / name, flags)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if stat.S_ISREG(os.fstat(file).st_mode):
                        os.unlink(folder / name)
                finally:
                    os.close(file)


def _target(path: str) -> Path:
    """The file that is meant: the one behind a symbolic link is replaced, not the link."""
    # `~nobody` stays as it is here, where Path.expanduser fails
    return Path(os.path.realpath(os.path.expanduser(path)))


def _stream(target: Path) -> bool:
    """Whether the path is a pipe or device, which is written in place."""
    return os.path.exists(target) and not os.path.isfile(target)


@contextmanager
def _opened(path: str, target: Path, mode: str) -> Iterator[BinaryIO]:
    with _write_errors(path):
        raw = _File(target, mode, path)
    file = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    try:
        yield file
        with _write_errors(path):
            file.close()
    finally:
        with contextlib.suppress(OSError, WriteFailed):  # what is left in the buffer is not wanted
            file.close()
        with contextlib.suppress(OSError):
            raw.close()


class _File(io.FileIO):
    """A file whose writes fail with WriteFailed: the block may do other work that can fail."""

    def __init__(self, target: Path, mode: str, path: str) -> None:
        super().__init__(target, mode)
        self._path = path

    def write(self, data: Any) -> int:
        """Writes as much as the system takes at once. Raises WriteFailed."""
        with _write_errors(self._path):
            return super().write(data)


@contextmanager
def _write_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "make room on the disk, or write to another one" if full else OTHER_PLACE
        raise WriteFailed(f"could not write `{path}`: {reason}", hint=hint) from error
