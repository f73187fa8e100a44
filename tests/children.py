"""Child processes of the tests: their signals are at the defaults, and none outlives its test.

A child inherits which signals its parent ignores. Under a parent that ignores SIGINT (a
background job, some CI runners) Ctrl-C would not reach it, and it would run on for ever.
"""

import os
import signal
import subprocess
import time
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
    """One of this machine; `seconds` of processor time; `waits`: it sleeps; `ended`: a zombie."""

    pid: int
    parent: int
    seconds: float
    waits: bool
    ended: bool
    words: str


def processes() -> list[Process]:
    """All there are, of Linux."""
    found = map(process, (int(name) for name in os.listdir("/proc") if name.isdigit()))
    return [one for one in found if one is not None]


def process(pid: int) -> Process | None:
    """The one with that id, of Linux; None if there is none any more."""
    folder = Path(f"/proc/{pid}")
    try:
        # the name in brackets may hold anything
        state, *rest = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return None
    seconds = (int(rest[10]) + int(rest[11])) / os.sysconf("SC_CLK_TCK")
    return Process(pid, int(rest[0]), seconds, state == "S", state == "Z", words)


def runs(pid: int) -> bool:
    """Whether there is that process, and no zombie."""
    found = process(pid)
    return found is not None and not found.ended


def until(done: Callable[[], Any]) -> Any:
    """What `done()` returns as soon as it is true, however busy the machine is."""
    end = time.monotonic() + 60
    while not (found := done()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)
    return found


def until_computed(pid: int, seconds: float) -> None:
    """Waits until the process has taken so much more processor time."""

    def taken() -> float:
        found = process(pid)
        assert found is not None
        assert not found.ended
        return found.seconds

    begun = taken()
    until(lambda: taken() >= begun + seconds)


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
