"""What `llmcli env` shows: the machine, each setting and its source, the configuration file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from llmcli.records.document import APART
from llmcli.records.machine import Environment


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting: its value, and whether a flag, a variable, the file or none of them set it.

    `value` is None where nothing is set and something else decides; paths are absolute, and of a
    secret it only says that there is one. `origin`: the flag, the variable or the file's key, empty
    for a default.
    """

    name: str
    value: str | bool | None
    words: str = field(metadata=APART)  # the value, or what decides; paths begin with `~`
    source: Literal["flag", "environment", "file", "default"] = "default"
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class ConfiguredOption:
    """An option that the configuration file sets, for all commands or for one."""

    command: str | None
    option: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class ConfigurationProblem:
    """What is wrong with the configuration file, and what to do about it."""

    message: str
    hint: str | None


@dataclass(frozen=True, kw_only=True)
class ConfigurationReport:
    """The configuration file: its place (None: none is read), and what it sets."""

    path: str | None
    exists: bool
    options: tuple[ConfiguredOption, ...] = ()
    problems: tuple[ConfigurationProblem, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EnvironmentReport:
    """What `llmcli env` prints."""

    environment: Environment = field(metadata=APART)
    settings: tuple[Setting, ...]
    configuration: ConfigurationReport
