"""The configuration file: where it is, what is in it by command, and what that means to options.

One TOML file: $LLMCLI_CONFIG, else `llmcli/config.toml` in the XDG configuration folder. Its keys
are options without their dashes: at the top for every command that has such an option, in a table
`[chat]` or `[models.pull]` for one command.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from llmcli import OPENMP_THREADS, WITHIN_QUOTA, xdg
from llmcli.errors import LlmcliError, UsageError
from llmcli.records.numbers import did_you_mean

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


def _keys(path: Path, document: Mapping[str, Any], commands: Sequence[str]) -> tuple[Key, ...]:
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
                hint = did_you_mean([f"[{one}]" for one in near], "see `llmcli --help`")
                raise refused(path, f"unknown command `{typed}`", hint=hint)
            elif (twin := keys.setdefault((command, key.name), key)) is not key:
                raise refused(path, f"`{twin}` and `{key}` are one option")
    return tuple(keys.values())


# Environment variables that say the same as an option, and win over the file.
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "model": ("LLMCLI_MODEL",),
    "offline": ("LLMCLI_OFFLINE", "HF_HUB_OFFLINE"),
    "threads": () if WITHIN_QUOTA else OPENMP_THREADS,  # then they are not the user's
}
# What the file sets gives way to these where they are given, which do not exclude it when typed.
YIELDS: Mapping[str, tuple[str, ...]] = {
    "system": ("load",),  # a conversation with its own settings
    "variable": ("load",),
    "model": ("hf_repo",),
}
_ONE_RUN = "it belongs to one run: give it on the command line"
_SCRIPTS = "scripts rely on what they asked for: give it on the command line"
_REMOVES = "what removes or overwrites is said each time, on the command line"
_MODEL = 'name it with the model: `model = "org/name@rev"` or `"hf:org/name/file.gguf"`'
# Options that are not for the file (nor are options that take a file), and what to do instead.
COMMAND_LINE_ONLY: Mapping[str, str] = {
    **dict.fromkeys(("prompt", "ids", "synthetic", "random-weights"), _ONE_RUN),
    **dict.fromkeys(("json", "stream-json", "debug"), _SCRIPTS),
    **dict.fromkeys(("yes", "dry-run", "older-than", "force"), _REMOVES),
    **dict.fromkeys(("revision", "hf-repo"), _MODEL),
    "hf-token": "secrets are not for this file: set HF_TOKEN",
}


def listed(parameters: Iterable[Any]) -> list[Any]:
    """The options among the parameters of a command that its help lists."""
    return [one for one in parameters if one.param_type_name == "option" and not one.hidden]


def settable(option: Any) -> bool:
    """Whether the option may be set in the file."""
    return not option.is_eager and not _instead(option)


def defaults(ctx: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The file's values for the command of `ctx`, by parameter, without those that give way.

    `given`: the command line, by parameter. Raises UsageError that names file and key; not for
    a command that is `tolerant`.
    """
    options, root = _by_key(ctx.command), ctx.find_root().command
    general: dict[str, Any] = {}
    own: dict[str, Any] = {}
    try:
        file = read(root.configured)
        for key in file.keys(ctx.info_name):
            if (value := _checked(file, key, ctx.info_name, options, root)) is not None:
                (own if key.command else general)[options[key.name].name] = value
    except UsageError:
        if getattr(ctx.command, "tolerant", False):
            return {}
        raise
    if not (general or own):
        return {}
    yields = yields_to(ctx.command.params)
    own = _without_weaker(own, yields, given)
    return _without_weaker(general, yields, given, own) | own


def excluded(other: str) -> tuple[str, bool, str]:
    """`--what=state` in parts: a name, whether the value has to differ (`!=`), and the value."""
    name, _, value = other.partition("=")
    return name.rstrip("!"), name.endswith("!"), value


def yields_to(parameters: Iterable[Any]) -> dict[str, list[tuple[str, str, str]]]:
    """By name of a parameter those before which its value in the file gives way.

    Each with the value that it has to have for that, and the one that the file has to have; empty
    for any. These are the parameters that exclude it or that it excludes, and those in `YIELDS`.
    """
    known = {spelled: one.name for one in parameters for spelled in (*one.opts, one.display)}
    found = {name: [(other, "", "") for other in YIELDS.get(name, ())] for name in known.values()}
    for one in parameters:
        for text in one.excludes:
            name, differs, value = excluded(text)
            if (other := known.get(name)) is not None:
                value = "" if differs else value
                found[one.name].append((other, value, ""))
                found[other].append((one.name, "", value))
    return found


def examined(file: ConfigurationFile, root: Any) -> tuple[list[Key], list[UsageError]]:
    """The keys that are right for each command that they are meant for, and all that is wrong.

    Imports every command of `root`.
    """
    right: dict[str, Key] = {}
    wrong: dict[str, UsageError] = {}
    for command in root.configured:
        options = _options_of(root, command)
        for key in file.keys(command):
            try:
                _checked(file, key, command, options, root)
                right[str(key)] = key
            except UsageError as error:
                wrong.setdefault(str(key), error)
    return [key for label, key in right.items() if label not in wrong], list(wrong.values())


def from_file(ctx: Any, name: str) -> bool:
    """Whether the parameter was set by the configuration file."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def names_from_file(ctx: Any) -> frozenset[str]:
    """The parameters whose values are the configuration file's."""
    return frozenset(name for name in ctx.params if from_file(ctx, name))


def name_file(error: LlmcliError, ctx: Any) -> None:
    """Adds the file to the message of an error about an option, or a value, that it sets."""
    for key, option in _by_key(ctx.command).items():
        value = ctx.params.get(option.name)
        if from_file(ctx, option.name) and (
            re.search(rf"`{re.escape(option.display)}(?![\w-])", error.message)
            or (isinstance(value, str) and f"`{value}`" in error.message)
        ):
            error.message += f"; `{key}` is set in `{place()[0]}`"
            return


def _checked(
    file: ConfigurationFile, key: Key, command: str, options: Mapping[str, Any], root: Any
) -> Any | None:
    """The value of a key for a command; None for a key that is meant for others. UsageError."""
    option = options.get(key.name)
    if option is not None and settable(option):
        try:
            return _converted(option, key)
        except UsageError as error:
            whose = "" if key.command else f", for `llmcli {command}`"
            raise refused(file.path, error.message + whose, hint=error.hint) from None
    known: list[str] = []
    instead = ""
    elsewhere = (
        () if key.command else (_options_of(root, c) for c in root.configured if c != command)
    )
    for each in chain([options], elsewhere):
        known += [name for name, option in each.items() if settable(option)]
        if key.name in known:
            return None
        if key.name in each:
            instead = _instead(each[key.name])
    if instead:
        raise refused(file.path, f"`{key}` is not for a file", hint=instead)
    near = get_close_matches(key.name, known, 1)
    of = f"`llmcli {key.command}`" if key.command else "any command"
    raise refused(
        file.path,
        f"`{key}` is not an option of {of}",
        hint=did_you_mean(near),
    )


def _converted(option: Any, key: Key) -> Any:
    """The value of a key for an option; raises UsageError saying what is wrong."""
    if option.is_flag:
        if not isinstance(key.value, bool):
            raise UsageError(f"`{key}` is true or false, not `{key.value}`")
        return key.value
    values = key.value if isinstance(key.value, list) else [key.value]
    if isinstance(key.value, list) and not option.multiple:
        raise UsageError(f"`{key}` takes one value, not a list")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            kinds = {bool: "true or false", list: "a list", dict: "a table"}
            what = kinds.get(type(value), "a date or time")
            raise UsageError(f"`{key}` takes a text or a number, not {what}")
    found = [option.conversion(str(key), str(value)) for value in values]
    return found if option.multiple else found[0]


def _instead(option: Any) -> str:
    """What to do instead of setting the option in the file; nothing where it may be there."""
    takes_file = str(option.metavar).startswith(("FILE", "PATH"))
    return _ONE_RUN if takes_file else COMMAND_LINE_ONLY.get(option.display.lstrip("-"), "")


def _by_key(command: Any) -> dict[str, Any]:
    return {option.display.lstrip("-"): option for option in listed(command.params)}


@cache
def _options_of(root: Any, command: str) -> Mapping[str, Any]:
    """The options by key of any command, which is imported for that."""
    return _by_key(root.get_command(None, command))


def _without_weaker(
    values: Mapping[str, Any],
    yields: Mapping[str, Sequence[tuple[str, str, str]]],
    *stronger: Mapping[str, Any],
) -> dict[str, Any]:
    """`values` without what an environment variable or one of the `stronger` replaces."""
    set_ = {  # 0 is set, and equal to False
        name: str(value)
        for each in stronger
        for name, value in each.items()
        if value is not None and value is not False
    }
    return {
        name: value
        for name, value in values.items()
        if not any(
            other in set_ and theirs in ("", set_[other]) and ours in ("", str(value))
            for other, theirs, ours in yields[name]
        )
        and not any(os.environ.get(variable) for variable in VARIABLES.get(name, ()))
    }
