"""Counts bytes over all files of a download, for our progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llmcli.errors import CheckpointError, NetworkError
from llmcli.records.work import Progress


class Counted:
    """Bytes of a download of several files: `done` of `total`; `size` of the current file."""

    def __init__(self, what: str, sizes: Sequence[int | None], progress: Progress | None) -> None:
        self.total = sum(size or 0 for size in sizes)
        self.done = 0
        self._what, self._progress = what, progress
        self._before = 0
        self.size: int | None = None

    def begin(self, size: int | None) -> None:
        """Start the next file, of `size` bytes (None: unknown)."""
        self._before, self.size = self.done, size
        self.file(0)

    def file(self, done: int) -> None:
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
            count.file(self._done)

        def update_transfer(self, amount: float) -> None:
            """Ignored: bytes on the wire, fewer than the file's."""

        def set_transfer_postfix_str(self, *args: Any, **options: Any) -> None:
            """Ignored: the speed."""

    return Bar
