"""Bytes over all files of a download, for our progress instead of huggingface_hub's bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llmcli.errors import CheckpointError, NetworkError
from llmcli.records.progress import Progress


class Counted:
    """The bytes of one download of several files: `done` of `total`; `size` of the one in hand."""

    def __init__(self, what: str, sizes: Sequence[int | None], progress: Progress | None) -> None:
        self.total = sum(size or 0 for size in sizes)
        self.done = 0
        self._what, self._progress = what, progress
        self._before = 0
        self.size: int | None = None

    def begin(self, size: int | None) -> None:
        """The next file, of `size` bytes where that is known."""
        self._before, self.size = self.done, size
        self._tell()

    def file(self, done: int) -> None:
        """`done` bytes of the file in hand are here."""
        self.done = self._before + (min(done, self.size) if self.size else done)
        self._tell()

    def end(self) -> None:
        """The file in hand is whole."""
        self.done = self._before + (self.size or 0)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None and self.total:
            self._progress(self._what, min(self.done, self.total), self.total)


def bar(count: Counted, check_room: Callable[[int], None] | None = None) -> Any:
    """What the library takes for the class of its bars, and which draws nothing.

    `check_room` is called with the bytes of a file that are to come, before they do: the hub may
    promise more of a file than it lists.
    """

    class Bar:
        """The part of tqdm's interface that is used; Xet reports from a thread of its own."""

        def __init__(self, **options: Any) -> None:
            if options.get("total") is None:
                raise NetworkError("the hub does not state how large a file is")
            self.total = int(options["total"])
            self._done = int(options.get("initial") or 0)
            if count.size not in (None, self.total):
                raise CheckpointError(
                    f"the hub sends {self.total} bytes of a file that it lists with {count.size}",
                    hint="run the command again; if it stays so, something on the way changes it",
                )
            if check_room is not None:
                check_room(self.total - self._done)

        def update(self, amount: float | None = 1) -> None:
            """Called before the bytes are written: a body without an end stops here."""
            self._done += int(amount or 0)
            if self._done > self.total:
                raise CheckpointError("the hub sends more of a file than it has")
            count.file(self._done)

        def update_transfer(self, amount: float) -> None:
            """Bytes on the wire, which are fewer than the file's."""

        def set_postfix_str(self, *args: Any, **options: Any) -> None:
            """A speed."""

        set_transfer_postfix_str = set_postfix_str

        def refresh(self) -> None:
            """Drawing, which is not done here."""

        close = refresh

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

    return Bar
