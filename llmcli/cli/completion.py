"""Completion scripts for bash, zsh and fish, written out from the command tree.

Commands, options, metrics, formats and file endings are written into the scripts: completing
these starts no Python. For what depends on a model or on the caches they call `llmcli _complete`
(`shells.answer`). `python -m llmcli.cli.completion completions/` writes the files that are
committed; a test compares them with the tree.
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
from llmcli.cli.shells.bash import bash
from llmcli.cli.shells.fish import fish
from llmcli.cli.shells.spec import CommandSpec, Spec, Value
from llmcli.cli.shells.zsh import zsh
from llmcli.errors import UsageError, WriteFailed
from llmcli.shell.files import whole_file

FILES = {"bash": "llmcli.bash", "zsh": "_llmcli", "fish": "llmcli.fish"}
MODEL_OPTIONS = ("model", "versus", "draft")  # a file, a directory or a catalog name
# options and commands whose files have these endings, where the command's module has no `FILES`
ENDINGS = {
    ("ladder", "save"): ("json",),
    ("timing", "trace"): ("json",),
    ("chat", "save"): ("json",),
}
STORED = ("models rm", "models path")  # whose arguments are models on this machine


def tree() -> tuple[CommandSpec, list[CommandSpec]]:
    """The root and all commands. Imports every command's module, none of which imports torch."""
    from llmcli.cli.tree import root

    top: Any = root()
    context: Any = top.make_context("llmcli", [], resilient_parsing=True)

    def spec(name: str, summary: str) -> CommandSpec:
        command = top.get_command(context, name)
        inner = command.make_context(name, [], parent=context, resilient_parsing=True)
        nested = [n for n in top.nested if n.split()[0] == name and n != name]
        module = sys.modules[(top.entries.get(name) or top.nested[name]).module]
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        return CommandSpec(
            name=name,
            help=summary,
            options=_options(command, inner, getattr(module, "FILES", ())),
            nested=tuple(spec(n, top.nested[n].summary) for n in nested),
            argument=_argument(name, [str(p.metavar) for p in arguments]),
            several=name not in ("help", "explain", "models path"),
        )

    commands = [spec(name, top.entries[name].summary) for name in top.list_commands(context)]
    return CommandSpec(name="", help="", options=_options(top, context, ())), commands


def script(shell: str) -> str:
    """The completion script for `shell`; raises UsageError for a shell that has none."""
    writer = WRITERS.get(shell)
    if writer is None:
        raise UsageError(
            f"there is no completion for the shell `{shell}`",
            hint=f"name one of {', '.join(FILES)} behind the option",
        )
    return writer(*tree())


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


def _argument(command: str, metavars: Sequence[str]) -> Value:
    """What can be the arguments of a command."""
    from llmcli.checkpoints.catalog import CATALOG
    from llmcli.cli.topics import TOPICS
    from llmcli.cli.tree import ENTRIES

    if command in STORED:
        return Value(kind="stored")
    if command == "help":
        return Value(kind="words", words=tuple(dict.fromkeys((*TOPICS, *ENTRIES))))
    if metavars == ["[NAME[INDEX]]", "[PROMPT]"]:
        return Value(kind="tensor")
    if metavars == ["A", "B"]:
        return Value(kind="files")
    return Value(kind="words", words=tuple(CATALOG)) if metavars == ["NAME..."] else Value()


def _options(command: Any, context: Any, endings: Sequence[str]) -> tuple[Spec, ...]:
    """The options that are shown; `endings` are of files that the command writes."""
    return tuple(
        Spec(
            names=tuple(sorted(option.opts, key=len)),
            help=_short(option.help or ""),
            value=None if option.is_flag else _value(str(command.name), option, endings),
            repeats=bool(option.multiple),
        )
        for option in command.get_params(context)
        if option.param_type_name == "option" and not option.hidden
    )


def _value(command: str, option: Any, endings: Sequence[str]) -> Value:
    """What the value of an option can be."""
    from llmcli.checkpoints.catalog import CATALOG
    from llmcli.records.head_metrics import METRICS

    metavar, name = str(option.metavar or ""), str(option.name)
    choices: Sequence[str] = getattr(getattr(option, "conversion", None), "choices", ())
    endings = ENDINGS.get((command, name), endings if "--output" in option.opts else ())
    if name in MODEL_OPTIONS:
        more = ("ngram",) if "ngram" in metavar else ()
        return Value(kind="model", words=(*more, *CATALOG))
    if name == "device":
        return Value(kind="words", words=("auto", "cpu", "cuda", "mps"))
    if name in ("map", "metrics"):
        names = tuple(metric.name for metric in METRICS)
        return Value(kind="words", words=names) if name == "map" else Value(
            kind="list", words=("all", *names))  # fmt: skip
    if name in ("name", "filter"):
        return Value(kind="weights" if command == "load" else "names")
    if name == "layer":
        return Value(kind="layers")
    if choices:
        return Value(kind="words", words=tuple(choices))
    if metavar.startswith("FILE") and endings:
        return Value(kind="outputs", words=tuple(endings))
    if metavar.startswith(("FILE", "PATH")):
        return Value(kind="files")
    words = tuple(word for word in metavar.split("|") if not word.isupper())
    return Value(kind="words", words=words) if "|" in metavar else Value()


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
