"""Child processes of the tests: their signals are at the defaults, and none outlives its test.

A child inherits which signals its parent ignores. Under a parent that ignores SIGINT (a
background job, some CI runners) Ctrl-C would not reach it, and it would run on for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1

_started: list[subprocess.Popen[Any]] = []


def start(
    argv: Sequence[str], *, prepare: Callable[[], object] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """`subprocess.Popen` in a session of its own; `prepare` is called in the child before."""
    process = subprocess.Popen(argv, **_plain(prepare), **_unconfigured(options))
    _started.append(process)
    return process


def run(argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, which waits for the child or kills it, in a session of its own."""
    check = options.pop("check", False)
    return subprocess.run(argv, check=check, **_plain(None), **_unconfigured(options))


def end_all() -> None:
    """Kills every child that `start` started, and its own children with it."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _unconfigured(options: dict[str, Any]) -> dict[str, Any]:
    """No child reads the developer's own configuration file, whatever its environment is."""
    given = options.get("env")
    return options | {"env": {"LLMCLI_CONFIG": "", **(os.environ if given is None else given)}}


def _plain(prepare: Callable[[], object] | None) -> dict[str, Any]:
    parent = os.getpid()

    def in_the_child() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if prepare is not None:
            prepare()
        if _LIBC is not None:  # last: a change of user takes it back
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # which was killed meanwhile
                os._exit(1)

    return {"preexec_fn": in_the_child, "start_new_session": True}
