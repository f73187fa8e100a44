"""Results that are taller than the terminal go through a pager, as git's do."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping


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
    """Whether all lines of `text`, and the prompt of the shell below them, are on the screen."""
    return text.count("\n") < height


def page(text: str) -> bool:
    """Shows `text` in the user's pager and waits for its end; False where it could not be started.

    less is told, unless `$LESS` is set, to quit where all fits (F), to pass colours on (R) and to
    leave the text on the screen (X). Ctrl-C is the pager's while it runs.
    """
    command = pager_command(os.environ)
    if not command:
        return False
    environ = {"LESS": "FRX", **os.environ}
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.flush()
    before = signal.signal(signal.SIGINT, lambda *_: None)  # a pager would inherit SIG_IGN
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
        child.communicate(text.encode(encoding, "backslashreplace"))  # an early quit is no error
    except OSError:
        return False
    finally:
        signal.signal(signal.SIGINT, before)
    return True
