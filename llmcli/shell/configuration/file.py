"""The configuration file: where it is, and what is in it by command.

One TOML file: $LLMCLI_CONFIG, else `llmcli/config.toml` in the XDG configuration folder. Its keys
are options without their dashes: at the top for every command that has such an option, in a table
`[chat]` or `[models.pull]` for one command. Whether they are right, `values` knows.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from llmcli import xdg
from llmcli.errors import UsageError

VARIABLE = "LLMCLI_CONFIG"
MOST = 1 << 20  # bytes of the file
LONG = 300  # characters of a message, which may repeat any text of the file


@dataclass(frozen=True)
class Key:
    """One key of the file: of the table of `command`, or at the top ("") for all of them."""

    command: str
    typed: str
    value: Any

    @property
    def name(self) -> str:
        """The option, whose dashes may be underscores in the file."""
        return self.typed.replace("_", "-")

    def __str__(self) -> str:
        return ".".join([*self.command.split(), self.typed])


@dataclass(frozen=True)
class ConfigurationFile:
    """What the file says."""

    path: Path | None
    written: tuple[Key, ...] = ()

    def keys(self, command: str) -> Iterator[Key]:
        """All that is meant for a command, its own table last."""
        for table in ("", command):
            yield from (key for key in self.written if key.command == table)


def place() -> tuple[Path | None, str]:
    """Where the file is, None where none is to be read, and the variable that says so."""
    if (named := os.environ.get(VARIABLE)) is not None:
        return Path(os.path.expanduser(named)) if named else None, VARIABLE
    try:
        path = xdg.folder("XDG_CONFIG_HOME", "~/.config") / "llmcli" / "config.toml"
    except RuntimeError:  # there is no home directory
        return None, ""
    return path, "XDG_CONFIG_HOME" if os.environ.get("XDG_CONFIG_HOME") else ""


def read(commands: Sequence[str]) -> ConfigurationFile:
    """The file, with tables for those commands; its keys are not checked yet.

    Raises UsageError for what is no such file.
    """
    path, variable = place()
    data = None if path is None else _bytes(path, named=variable == VARIABLE)
    if path is None or data is None:
        return ConfigurationFile(path)
    import tomllib

    try:
        document = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise refused(path, "it is not UTF-8") from None
    except RecursionError:
        raise refused(path, "it is nested too deeply") from None
    except ValueError as error:  # of tomllib, or a number of more digits than Python converts
        text = str(error)
        raise refused(path, f"it is not TOML: {text[:1].lower()}{text[1:]}") from None
    return ConfigurationFile(path, _keys(path, document, commands))


def refused(path: Path | None, message: str, *, hint: str | None = None) -> UsageError:
    """The error for something that is wrong with the file."""
    usual = f"correct it, or do without it: `{VARIABLE}= llmcli …`"
    cut = message if len(message) <= LONG else f"{message[:LONG]}…"
    return UsageError(f"configuration file `{path}`: {cut}", hint=hint or usual)


def _bytes(path: Path, *, named: bool) -> bytes | None:
    """None where there is no file, which is an error where the user `named` it."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise refused(path, "it is a directory")
        if not stat.S_ISREG(status.st_mode) and str(path) != os.devnull:
            raise refused(path, "it is not a regular file")
        with path.open("rb") as file:
            data = file.read(MOST + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not named:
            return None
        raise refused(path, (error.strerror or str(error)).lower()) from error
    if len(data) > MOST:
        raise refused(path, "it is larger than 1 MiB")
    return data


def _keys(
    path: Path, document: Mapping[str, Any], commands: Sequence[str]
) -> tuple[Key, ...]:
    """The keys of all tables. Raises UsageError for tables of no command, and for twins."""
    keys: dict[tuple[str, str], Key] = {}
    pending = [("", document)]
    while pending:
        command, table = pending.pop()
        for typed, value in table.items():
            key = Key(command, typed, value)
            inner = f"{command} {typed}".strip()
            if isinstance(value, dict) and inner in commands:
                pending.append((inner, value))
            elif isinstance(value, dict) and not command:
                near = get_close_matches(typed, [one for one in commands if " " not in one], 1)
                hint = f"did you mean `[{near[0]}]`?" if near else "see `llmcli --help`"
                raise refused(path, f"unknown command `{typed}`", hint=hint)
            elif (twin := keys.setdefault((command, key.name), key)) is not key:
                raise refused(path, f"`{twin}` and `{key}` are one option")
    return tuple(keys.values())
