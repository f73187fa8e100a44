"""`llmcli` as a process of its own, on pipes or on a terminal."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import children
from chat_terminal import Window

ROOT = Path(__file__).parents[2]


def start(*argv, **options):
    """Nothing is on its stdin, the rest are pipes; `options` of `children.start` come first."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "llmcli", *map(str, argv)]
    return children.start(command, **({"cwd": ROOT} | streams | options))


@contextmanager
def pipe(path):
    """A named pipe, which stays one: the descriptor that reads it."""
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield reading
    os.close(reading)
    assert path.is_fifo()


def ended(process, code=0):
    """What it wrote to stdout, and to stderr as text, until it ended with that code."""
    out, err = process.communicate(timeout=60)
    err = err if isinstance(err, str) else (err or b"").decode()
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out or b"", err


def on_terminal(*argv, **how):
    """In a `Window` of 200 columns; `how`: its `stdout`, and variables of the environment."""
    command = [sys.executable, "-m", "llmcli", *map(str, argv)]
    return Window(command, columns=200, cwd=ROOT, **{"TERM": "xterm", "COLUMNS": "200"} | how)
