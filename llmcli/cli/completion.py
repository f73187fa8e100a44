"""Installs the completion scripts of bash, zsh and fish, which are in `assets/completions`.

They are small and the same for every version: `complete` answers what they ask.
"""

from __future__ import annotations

import errno
import os
import shlex
from importlib.resources import files
from pathlib import Path

from llmcli import xdg
from llmcli.errors import UsageError, WriteFailed
from llmcli.shell.files import whole_file

FILES = {"bash": "llmcli.bash", "zsh": "_llmcli", "fish": "llmcli.fish"}


def script(shell: str) -> str:
    """The completion script for `shell`; raises UsageError for a shell that has none."""
    if shell not in FILES:
        raise UsageError(
            f"there is no completion for the shell `{shell}`",
            hint=f"name one of {', '.join(FILES)} behind the option",
        )
    place = files("llmcli") / "assets" / "completions" / FILES[shell]
    return place.read_text(encoding="utf-8")


def current_shell() -> str:
    """The name of the shell that started us (`$SHELL` where the parent process is none)."""
    try:
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        parent = ""
    return parent if parent in FILES else Path(os.environ.get("SHELL", "")).name


def install(shell: str) -> str:
    """Writes the script where `shell` looks, and its start-up line where it needs one.

    Returns what was done, to be printed. Raises UsageError and WriteFailed.
    """
    text = script(shell)
    home = Path.home()
    data = xdg.folder("XDG_DATA_HOME", "~/.local/share")
    config = xdg.folder("XDG_CONFIG_HOME", "~/.config")
    target = {
        "bash": data / "llmcli" / "llmcli.bash",
        "zsh": data / "llmcli" / "zsh" / "_llmcli",
        "fish": config / "fish" / "completions" / "llmcli.fish",
    }[shell]
    start_up = {
        "bash": (home / ".bashrc", f"source {shlex.quote(str(target))}"),
        "zsh": (
            Path(os.environ.get("ZDOTDIR") or home) / ".zshrc",
            f"fpath+=({shlex.quote(str(target.parent))}); autoload -Uz compinit; compinit",
        ),
    }.get(shell)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(str(target)) as file:
            file.write(text.encode())
        said = f"wrote {target}"
        if start_up is not None:
            said += _append(*start_up)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        where = error.filename or (start_up[0] if start_up else target)  # a write has no name
        message = f"could not install completion in `{where}`: {reason}"
        raise WriteFailed(message) from error
    return f"{said}\nopen a new {shell} to use it"


def _append(path: Path, line: str) -> str:
    """Adds `line` to a start-up file that does not have it yet; returns what to tell.

    All of it or nothing: every new shell would complain about half a line.
    """
    before = path.read_bytes() if path.exists() else b""
    if line.encode() in before.splitlines():
        return ""
    added = ("" if not before or before.endswith(b"\n") else "\n") + line + "\n"
    with path.open("ab", buffering=0) as file:
        if file.write(added.encode()) < len(added.encode()):
            file.truncate(len(before))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return f" and added a line to {path}"
