"""Completion scripts for bash, zsh and fish, written out from the command tree.

They are static: pressing Tab starts no Python. `python -m llmcli.cli.completion completions/`
writes the files that are committed; a test compares them with the tree.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmcli import xdg
from llmcli.cli.files import whole_file
from llmcli.cli.shells import CommandSpec, Spec, bash, fish, zsh
from llmcli.errors import UsageError, WriteFailed

FILES = {"bash": "llmcli.bash", "zsh": "_llmcli", "fish": "llmcli.fish"}
FILE_OPTIONS = ("file", "batch")  # options whose value is a file's path
MODEL_OPTIONS = ("model", "versus")  # a file, a directory or a catalog name
FILE_ARGUMENTS, NAME_ARGUMENTS = ("A", "B"), ("NAME", "NAME...")  # files, names of models


def tree() -> tuple[CommandSpec, list[CommandSpec]]:
    """The root and all commands. Imports every command's module, none of which imports torch."""
    from llmcli.checkpoints.catalog import CATALOG
    from llmcli.cli.tree import ENTRIES, NESTED, root

    top: Any = root()
    context: Any = top.make_context("llmcli", [], resilient_parsing=True)

    def spec(name: str, summary: str) -> CommandSpec:
        command = top.get_command(context, name)
        inner = command.make_context(name, [], parent=context, resilient_parsing=True)
        nested = [n for n in NESTED if n.split()[0] == name and n != name]
        behind = {p.metavar for p in command.params if p.param_type_name == "argument"}
        return CommandSpec(
            name,
            summary,
            _options(command, inner),
            nested=tuple(spec(n, NESTED[n].summary) for n in nested),
            files=not behind.isdisjoint(FILE_ARGUMENTS),
            values=() if behind.isdisjoint(NAME_ARGUMENTS) else tuple(CATALOG),
        )

    commands = [spec(name, ENTRIES[name].summary) for name in top.list_commands(context)]
    return CommandSpec("", "", _options(top, context)), commands


def script(shell: str) -> str:
    """The completion script for `shell`; raises UsageError for a shell that has none."""
    writer = WRITERS.get(shell)
    if writer is None:
        raise UsageError(
            f"there is no completion for the shell `{shell}`",
            hint=f"there is one for {', '.join(FILES)}; set SHELL to one of them",
        )
    return writer(*tree())


def current_shell() -> str:
    """The name of the shell that started us (`$SHELL` where the parent process is none)."""
    try:
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        parent = ""
    return parent if parent in FILES else Path(os.environ.get("SHELL", "")).name


def install() -> str:
    """Writes the script where the current shell looks, and its start-up line where it needs one.

    Returns what was done, to be printed. Raises UsageError and WriteFailed.
    """
    shell = current_shell()
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

    All of it or nothing: half a line there would be told by every shell that starts.
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


def _options(command: Any, context: Any) -> tuple[Spec, ...]:
    from llmcli.checkpoints.catalog import CATALOG

    found = []
    for option in command.get_params(context):
        if option.param_type_name != "option" or option.hidden:
            continue
        values: Sequence[str] = getattr(getattr(option, "conversion", None), "choices", ())
        if option.name in MODEL_OPTIONS:
            values = tuple(CATALOG)
        elif option.name == "device":
            values = ("auto", "cpu", "cuda", "mps")
        elif option.name == "dtype":
            values = values or ("auto", "float64", "float32", "bfloat16", "float16")
        elif not values and "|" in (option.metavar or ""):
            values = tuple(str(option.metavar).split("|"))
        found.append(
            Spec(
                names=tuple(sorted(option.opts, key=len)),
                help=_short(option.help or ""),
                takes_value=not option.is_flag,
                values=tuple(values),
                files=option.name in (*FILE_OPTIONS, *MODEL_OPTIONS),
                repeats=bool(option.multiple),
            )
        )
    return tuple(found)


def _short(text: str) -> str:
    """The help's first sentence, without the default."""
    text = re.sub(r"\s*\[default[^]]*\]", "", text)
    return re.split(r"(?<=[a-z)])[.;:] ", text)[0].rstrip(".")


WRITERS = {"bash": bash, "zsh": zsh, "fish": fish}


def main(folder: Path) -> None:
    """Writes the three files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for shell, name in FILES.items():
        (folder / name).write_text(script(shell))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "completions"))
