"""Child processes of the tests: their signals are at the defaults, and none outlives its test.

A child inherits which signals its parent ignores. Under a parent that ignores SIGINT (a
background job, some CI runners) Ctrl-C would not reach it, and it would run on for ever.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fork_server import Forked, be_plain, end_with, server_for

# a program begins with it and goes on in a process for each argument, `words`
EACH = """
import os, sys
codes = ["exit codes:"]
for words in sys.argv[1:]:
    if not (process := os.fork()):
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
else:
    print(*codes, file=sys.stdout or sys.stderr)
    sys.exit()
"""

_started: list[subprocess.Popen[Any]] = []


def start(
    argv: Sequence[str],
    *,
    prepare: Callable[[], object] | None = None,
    terminal: bool = False,
    fresh: bool = False,
    **options: Any,
) -> subprocess.Popen[Any]:
    """`subprocess.Popen` in a session of its own; `prepare` is called in the child before.

    `terminal`: its stdin is the terminal that controls it, as in a window. `fresh`: nothing is
    imported before, for those that look at their start or at their memory.
    """
    options = _unconfigured(options)
    if prepare is None and not fresh and server_for(argv, options["env"]):
        process: subprocess.Popen[Any] = Forked([*argv], terminal=terminal, **options)
    else:
        process = subprocess.Popen(argv, **_plain(prepare, terminal), **options)
    _started.append(process)
    return process


def run(
    argv: Sequence[str], *, input: Any = None, timeout: float | None = None, check: bool = False,
    capture_output: bool = False, **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """`subprocess.run`, which waits for the child or kills it, in a session of its own."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(argv, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        finally:
            _end(process)
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@dataclass(frozen=True)
class Process:
    """One that runs on this machine; `seconds` of processor time; `ended`: it is a zombie."""

    pid: int
    parent: int
    seconds: float
    ended: bool
    words: str


def processes() -> list[Process]:
    """All there are, of Linux."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # the name in brackets may hold anything
            rest = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
        ticks = int(rest[11]) + int(rest[12])
        seconds = ticks / os.sysconf("SC_CLK_TCK")
        found.append(Process(int(folder.name), int(rest[1]), seconds, rest[0] == "Z", words))
    return found


def end_all() -> None:
    """Kills every child that `start` started, and its own children with it."""
    while _started:
        _end(_started[-1])


def _end(process: subprocess.Popen[Any]) -> None:
    _started.remove(process)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _unconfigured(options: dict[str, Any]) -> dict[str, Any]:
    """No child reads the developer's own configuration file, in any environment."""
    given = options.get("env")
    return options | {"env": {"LLMCLI_CONFIG": "", **(os.environ if given is None else given)}}


def _plain(prepare: Callable[[], object] | None, terminal: bool) -> dict[str, Any]:
    parent = os.getpid()

    def in_the_child() -> None:
        be_plain(terminal)
        if prepare is not None:
            prepare()
        end_with(parent)

    return {"preexec_fn": in_the_child, "start_new_session": True}
