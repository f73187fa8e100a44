"""What there is to complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "text", "words", "list", "files", "outputs", "model", "stored", "names", "tensor", "weights",
    "layers",
]  # fmt: skip
# kinds that `llmcli _complete KIND WORD LINE…` answers, see `cli.shells.answer`
DYNAMIC = ("model", "stored", "names", "tensor", "weights", "layers")


@dataclass(frozen=True, kw_only=True)
class Value:
    """What a value can be: anything (`text`), one of `words`, or as `kind` says.

    `list`: several of `words`, separated by commas; `outputs`: a file whose ending is one of
    `words`; `model`: one of `words`, a model in a cache, or a path that `--model` takes for one,
    which begins with `.`, `/` or `~` or ends in `.gguf` or `.safetensors`; `stored`: a model that
    is on this machine; `names`: patterns of tensors, separated by commas; `weights`: the same of
    parameters; `tensor`: the name of one; `layers`: numbers of layers, ranges and lists of them.
    """

    kind: Kind = "text"
    words: tuple[str, ...] = ()

    @property
    def dynamic(self) -> bool:
        """Whether `llmcli` is run for candidates, too."""
        return self.kind in DYNAMIC


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One option: its names, help, and what its value can be (None for a switch)."""

    names: tuple[str, ...]
    help: str
    value: Value | None
    repeats: bool


@dataclass(frozen=True, kw_only=True)
class CommandSpec:
    """One command, or the root (`name` empty), with its options.

    `nested`: commands of two words, which are found behind this one. `argument`: what its
    arguments are, of which only the first is completed unless there are `several`.
    """

    name: str
    help: str
    options: tuple[Spec, ...]
    nested: tuple[CommandSpec, ...] = ()
    argument: Value = Value()
    several: bool = False

    @property
    def words(self) -> str:
        """The last word of its name."""
        return self.name.rpartition(" ")[2]
