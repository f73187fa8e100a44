"""The options of `llmcli shapes`: which calls, and which tensors of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal

from llmcli.cli.params import LARGEST, opt
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.commands.shapes.measure.tensors import Asked
    from llmcli.commands.shapes.report import Stored
    from llmcli.config import ModelConfig
    from llmcli.graph.spec import Kind, Phase

SHAPES = "Shapes"
TOKENS = 12  # of the prompt that shapes are written out for where none is given


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Which calls of the model the numbers are for."""

    panel: ClassVar[str] = SHAPES
    phase: Literal["prefill", "decode", "both"] = opt(
        "both", "--phase", "PHASE",
        "Reading the prompt (prefill), one step after it (decode), or both.",
    )  # fmt: skip
    batch: int = opt(1, "--batch", "B", "Sequences side by side.", at_least=1, at_most=LARGEST)
    tokens: int | None = opt(
        None, "--tokens", "T",
        f"Tokens of the prompt. [default: those of PROMPT, else {TOKENS}]",
        at_least=1, at_most=LARGEST,
    )  # fmt: skip

    def phases(self) -> tuple[Phase, ...]:
        """Those that are shown."""
        return ("prefill", "decode") if self.phase == "both" else (self.phase,)


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """Which tensors, and what is said of them."""

    panel: ClassVar[str] = SHAPES
    params: bool = opt(False, "--params", "Parameters only.")
    activations: bool = opt(False, "--activations", "Activations and the cache only.")
    layer: str | None = opt(None, "--layer", "0,3-5", "These layers only; -1 is the last.")
    filter: str | None = opt(
        None, "--filter", "GLOB",
        "Names only that match: blocks.*.attn.q, blocks.0-3.*, others' names too.",
    )  # fmt: skip
    names: bool = opt(
        False, "--names",
        "What each tensor is, its formula, and what others call it.",
    )  # fmt: skip

    def check(self, call: CallOptions) -> None:
        """Raises UsageError for options that leave each other nothing to do."""
        if self.params and self.activations:
            raise UsageError(
                "`--params` and `--activations` exclude each other",
                hint="leave both out, and everything is shown",
            )
        if self.params and call.phase != "both":
            raise UsageError(
                "`--phase` is about activations and the cache, and `--params` shows neither",
                hint="leave one of them out",
            )

    def chosen(self, stored: Sequence[Stored]) -> tuple[Stored, ...]:
        """Of the tensors of a file that has no configuration, those whose own names match.

        Raises UsageError for what only a configuration tells, and where none matches.
        """
        for flag, given in (("--layer", self.layer is not None), ("--names", self.names)):
            if given:
                raise UsageError(
                    f"`{flag}` needs the model's config.json beside the file",
                    hint='choose tensors by the names in the file: `--filter "*.0.*"`',
                )
        if self.filter is None:
            return tuple(stored)
        found = tuple(
            tensor
            for tensor in stored  # a name may have brackets of its own
            if tensor.source == self.filter or fnmatchcase(tensor.source, self.filter)
        )
        if not found:
            near = get_close_matches(self.filter, [tensor.source for tensor in stored], 1)
            raise UsageError(
                f"the file has no tensor `{self.filter}`",
                hint=f"did you mean `{near[0]}`?"
                if near
                else 'leave it out to see all of them, or use `*`, as in `--filter "*norm*"`',
            )
        return found

    def asked(self, config: ModelConfig) -> Asked:
        """What of that model is shown; UsageError for layers and names that are not there."""
        from llmcli.anatomy.names import select
        from llmcli.cli.looking import parse_numbers
        from llmcli.commands.shapes.measure.tensors import Asked
        from llmcli.families.sources import sources

        kinds: tuple[Kind, ...] = ("parameter", "activation", "state")
        if self.params or self.activations:
            kinds = kinds[:1] if self.params else kinds[1:]
        layers = names = None
        if self.layer is not None:
            layers = parse_numbers(self.layer, len(config.layers), "--layer", "layers")
        if self.filter is not None:
            found = select(self.filter, config, kinds=kinds, sources=sources(config))
            names = frozenset(found)
        return Asked(kinds=kinds, layers=layers, names=names)
