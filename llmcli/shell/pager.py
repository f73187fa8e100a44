"""Results that are taller than the terminal go through a pager, as git's do."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from llmcli.shell.keys import change_modes, modes_of


def pager_command(environ: Mapping[str, str]) -> list[str]:
    """`$LLMCLI_PAGER`, else `$PAGER`, else less; empty for none (empty, `cat`, or not there)."""
    chosen = environ.get("LLMCLI_PAGER", environ.get("PAGER", "less"))
    try:
        words = shlex.split(chosen)
    except ValueError:  # a quote without its other half
        return []
    if not words or words == ["cat"] or shutil.which(words[0]) is None:
        return []
    return words


def fits(text: str, height: int) -> bool:
    """Whether `text` and the shell prompt below it fit on one screen."""
    return text.count("\n") < height


def page(text: str) -> bool:
    """Shows `text` in the user's pager and waits for its end; False where it could not be started.

    less is told, unless `$LESS` is set, to quit where all fits (F), to pass colours on (R) and to
    leave the text on the screen (X). Ctrl-C is the pager's while it runs; what else ends this
    process ends it, too.
    """
    command = pager_command(os.environ)
    if not command:
        return False
    environ = {"LESS": "FRX", **os.environ}
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.flush()
    modes = modes_of(sys.stdout)
    child = None
    before = signal.signal(signal.SIGINT, lambda *_: None)  # a pager would inherit SIG_IGN
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
        child.communicate(text.encode(encoding, "backslashreplace"))  # an early quit is no error
    except OSError:
        return False
    except BaseException:  # a signal
        if child is not None:
            _end(child)
            if modes is not None:
                change_modes(sys.stdout, modes)
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a pager, and the one that it has started itself (`bat` and `delta` start less)."""
    family = [child.pid]
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):  # nothing on other systems
        with suppress(OSError):
            # `PID (NAME) STATE PARENT …`, and a name can have anything in it
            stat = path.read_bytes().rpartition(b")")[2]
            parents[int(path.parent.name)] = int(stat.split()[1])
    for one in family:
        family += [pid for pid, parent in parents.items() if parent == one]
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + 0.5
        for pid in family:
            _signal(pid, number)
        while time.monotonic() < end:
            child.poll()
            if not any(_signal(pid, 0) for pid in family):
                return
            time.sleep(0.01)


def _signal(pid: int, number: int) -> bool:
    """Sends a signal (0: none); whether there is such a process."""
    try:
        os.kill(pid, number)
        return True
    except OSError:
        return False
