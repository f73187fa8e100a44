"""`llmcli` as a process of its own, on pipes or on a terminal."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import children

ROOT = Path(__file__).parents[2]


def start(*argv, **options):
    """Nothing is on its stdin, the rest are pipes; `options` of `children.start` come first."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "llmcli", *map(str, argv)]
    return children.start(command, **({"cwd": ROOT} | streams | options))


def ended(process, code=0):
    """What it wrote to stdout, and to stderr as text, until it ended with that code."""
    out, err = process.communicate(timeout=60)
    err = err if isinstance(err, str) else (err or b"").decode()
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out or b"", err


def on_terminal(*argv, until=None, send=None, stdout=subprocess.DEVNULL, **environ):
    """Its exit code, and what it wrote to a terminal; `send` is called once `until` was shown.

    The text of a model with random weights can be anything: stdout is the terminal only if None.
    """
    controller, terminal = pty.openpty()
    process = start(
        *argv, stdin=terminal, stdout=terminal if stdout is None else stdout, stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200", **environ},
    )  # fmt: skip
    os.close(terminal)
    seen, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([controller], [], [], 0.2)[0]:
            try:
                seen += os.read(controller, 65536)
            except OSError:  # Linux: nobody has the terminal open any more
                break
        elif process.poll() is not None:
            break
        if send is not None and until in seen.decode(errors="replace"):
            send(process, controller)
            send = None
    os.close(controller)
    return process.wait(timeout=60), seen.decode(errors="replace")
