"""Programs that begin with their modules imported: llmcli in 0.05 s instead of a second.

Each process of the tests has two servers at most. One has imported PyTorch and llmcli's command
line but has run nothing; the other, for small programs, only Jinja. For a program a server forks
twice: its child is at once orphaned, and so becomes a child of the tests, which wait for it and
signal it as for any other. Run as a program, with the modules to import, this file is the server:
it reads requests and file descriptors from the socket that is its stdin.
"""

import ctypes
import fcntl
import gc
import io
import json
import os
import platform
import random
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MODULES = {
    "llmcli": (
        "llmcli.cli.app", "llmcli.cli.tree", "llmcli.shell.running",
        "llmcli.commands.generate.command", "llmcli.commands.chat.command",
        "llmcli.commands.chat.slash", "llmcli.commands.chat.typed", "llmcli.ui.markdown",
        "llmcli.commands.attention.command", "llmcli.engine.conversation", "llmcli.engine.stream",
        "llmcli.loading.load", "llmcli.inspect.formulas", "tokenizers", "safetensors.torch",
        "huggingface_hub", "prompt_toolkit", "rich.progress", "rich.syntax",
    ),
    "small": ("jinja2.ext", "jinja2.sandbox"),  # for what renders chat templates
}  # fmt: skip
_RENDERER = ["-S", "-s", "-P"]  # how llmcli starts it
_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_DATA)
# what Python, C libraries and modules read when they begin: another value needs another beginning
_EARLY = ("PYTHON", "LC_", "LANG", "OMP_", "GOMP_", "MKL_", "LD_", "TORCH", "CUDA", "MALLOC")


def be_plain(terminal: bool) -> None:
    """In a child: signals at their defaults; its stdin is the terminal that controls it, or not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def end_with(parent: int) -> None:
    """In a child: it is killed when its parent ends. A change of user takes that back."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # which was killed meanwhile
            os._exit(1)


class Forked(subprocess.Popen[Any]):
    """`subprocess.Popen`, but that a server forks the program where it can.

    Then it is in a session of its own; `terminal`: its stdin is the terminal that controls it.
    """

    def __init__(self, args: Any, *more: Any, terminal: bool = False, **options: Any) -> None:
        self._terminal = terminal
        super().__init__(args, *more, **options)

    def _execute_child(  # type: ignore[override]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
        env: Any, startupinfo: Any, creationflags: Any, shell: Any, *pipes_and_more: Any,
    ) -> None:  # fmt: skip
        plain = isinstance(args, list | tuple) and not (executable or preexec_fn or pass_fds)
        words = _of_python(list(map(os.fsdecode, args)), env) if plain and not shell else []
        kind = server_for(words, env)
        if kind is None:
            return super()._execute_child(  # type: ignore[misc, no-any-return]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, *pipes_and_more,
            )  # fmt: skip
        pipes = pipes_and_more[:6]
        fds = [pipes[0], pipes[3], pipes[5]]
        request = {
            "argv": words, "cwd": os.fspath(cwd or os.getcwd()),
            "environ": dict(os.environ if env is None else env), "parent": os.getpid(),
            "limits": {which: resource.getrlimit(which) for which in _LIMITS},
            "terminal": self._terminal,
        }  # fmt: skip
        self.pid = _server(kind).fork(request, [fd if fd != -1 else n for n, fd in enumerate(fds)])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _of_python(words: list[str], env: Mapping[str, str] | None) -> list[str]:
    """The words, with this Python in front if the first is a script of the PATH that names it."""
    path = None if env is None else env.get("PATH")
    script = shutil.which(words[0], path=path) if words[0] != sys.executable else None
    if script is not None and os.access(script, os.R_OK):
        with open(script, "rb") as file:
            if file.readline(500).decode(errors="replace") == f"#!{sys.executable}\n":
                return [sys.executable, script, *words[1:]]
    return words


def server_for(argv: Sequence[str | bytes], env: Mapping[str, str] | None) -> str | None:
    """Which server starts it, if any: a program of this Python that begins as this process did."""
    words = list(map(os.fsdecode, argv))
    ours = sys.platform == "linux" and words[:1] == [sys.executable] and len(words) > 1
    if not ours or __file__ in words:
        return None
    given = os.environ if env is None else env
    early = {name for name in given.keys() | os.environ.keys() if name.startswith(_EARLY)}
    rendering = words[1:4] == _RENDERER
    if rendering:
        early.discard("PYTHONPATH")  # which is to find Jinja
    if any(given.get(name) != os.environ.get(name) for name in early):
        return None
    if words[1:3] == ["-m", "llmcli"] or words[1].endswith("scripted.py"):
        return "llmcli"
    script = rendering or os.path.isfile(words[1])
    return "small" if script else None


class _Server:
    """The client's side of it."""

    def __init__(self, kind: str) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, kind], stdin=theirs, stdout=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self.owner = os.getpid()

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """The process's id; it is a child of this process by then."""
        words = json.dumps(request).encode("utf-8", "surrogateescape")
        assert _LIBC is not None
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self.socket, [len(words).to_bytes(4, "big")], fds)
            self.socket.sendall(words)
            pid = int.from_bytes(self.socket.recv(4, socket.MSG_WAITALL), "big")
        finally:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not pid:
            raise OSError("the fork server has ended")
        return pid


_servers: dict[str, _Server] = {}


def _server(kind: str) -> _Server:
    found = _servers.get(kind)
    if found is None or found.owner != os.getpid() or found.process.poll() is not None:
        found = _servers[kind] = _Server(kind)
    return found


def servers() -> set[int]:
    """Their process ids, of this process."""
    return {server.process.pid for server in _servers.values()}


def serve() -> dict[str, Any]:
    """Forks a process for each request; returns only in the new processes, with the request."""
    channel = socket.socket(fileno=os.dup(0))
    while True:
        head, fds, _, _ = socket.recv_fds(channel, 4, 3)
        if not head:
            os._exit(0)
        size = int.from_bytes(head, "big")
        request: dict[str, Any] = json.loads(
            channel.recv(size, socket.MSG_WAITALL).decode("utf-8", "surrogateescape")
        )
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if (child := os.fork()) == 0:
                channel.close()
                for at, fd in enumerate(fds):
                    os.dup2(fd, at)
                os.closerange(3, max(*fds, reading, writing) + 1)
                return request
            os.write(writing, child.to_bytes(4, "big"))
            os._exit(0)
        os.waitpid(between, 0)
        channel.sendall(os.read(reading, 4))
        for fd in (reading, writing, *fds):
            os.close(fd)


def become(request: dict[str, Any]) -> NoReturn:
    """Runs the program as Python would that has just begun."""
    while os.getppid() != request["parent"]:  # until the process between has ended
        time.sleep(0.0001)
    os.setsid()
    be_plain(request["terminal"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python has it when it began
    end_with(request["parent"])
    for which, limits in request["limits"].items():
        resource.setrlimit(int(which), tuple(limits))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    random.seed()
    held = not sys.stdout.write_through  # by Python's `-u`
    for at, name in enumerate(("stdin", "stdout", "stderr")):
        _reopen(at, name, held)
    words = request["argv"][1:]
    if words[: len(_RENDERER)] == _RENDERER:
        del words[: len(_RENDERER)]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def _reopen(fd: int, name: str, held: bool) -> None:
    """A standard stream as Python makes it; `held`: what is written waits in a buffer."""
    old = getattr(sys, name)
    raw = io.FileIO(fd, "r" if name == "stdin" else "w", closefd=False)
    raw.name = f"<{name}>"  # type: ignore[misc]
    binary = io.BufferedReader(raw) if name == "stdin" else io.BufferedWriter(raw) if held else raw
    stream = io.TextIOWrapper(
        binary, old.encoding, old.errors, newline="\n", write_through=not held,
        line_buffering=held and (raw.isatty() or name == "stderr"),
    )  # fmt: skip
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    for module in _MODULES[sys.argv[1]]:
        __import__(module)
    if sys.argv[1] == "llmcli":
        from llmcli.families.family import families

        families()
        platform.processor()  # which asks another program
    gc.collect()
    gc.freeze()  # else a child that ends would look for garbage in all of it: 0.5 s
    become(serve())
