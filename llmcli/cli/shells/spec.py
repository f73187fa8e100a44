"""What there is to complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """One option: its names, help, and what its value can be (`values` empty: anything).

    Values and files together are a model: a name, or a path that `--model` takes for one, which
    begins with `.`, `/` or `~` or ends in `.gguf` or `.safetensors`.
    """

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]
    files: bool
    repeats: bool

    @property
    def kind(self) -> str:
        """`model`, `files` or `words`."""
        return ("model" if self.values else "files") if self.files else "words"


@dataclass(frozen=True)
class CommandSpec:
    """One command, or the root (`name` empty), with its options.

    `nested`: commands of two words, which are found behind this one. `files`: its arguments are;
    `values`: these words are among what they can be.
    """

    name: str
    help: str
    options: tuple[Spec, ...]
    nested: tuple[CommandSpec, ...] = ()
    files: bool = False
    values: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The last word of its name."""
        return self.name.rpartition(" ")[2]


def model_names(commands: Sequence[CommandSpec]) -> tuple[str, ...]:
    """What is offered for `--model`."""
    options = [option for command in commands for option in command.options]
    return next(option.values for option in options if option.kind == "model")
