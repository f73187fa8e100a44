"""The options of `llmcli shapes`: which calls, and which tensors of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmcli.cli.params import LARGEST, Range

if TYPE_CHECKING:
    from llmcli.anatomy.spec import Kind, Phase
    from llmcli.config import ModelConfig
    from llmcli.measure.shapes import Asked

SHAPES = "Shapes"
TOKENS = 12  # of the prompt that shapes are written out for where none is given


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Which calls of the model the numbers are for."""

    phase: Annotated[
        Literal["prefill", "decode", "both"],
        typer.Option(
            "--phase",
            metavar="PHASE",
            rich_help_panel=SHAPES,
            help="Reading the prompt (prefill), one step after it (decode), or both.",
        ),
    ] = "both"
    batch: Annotated[
        int,
        typer.Option(
            "--batch", metavar="B", rich_help_panel=SHAPES, help="Sequences side by side."
        ),
        Range(1, LARGEST),
    ] = 1
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="T",
            rich_help_panel=SHAPES,
            help=f"Tokens of the prompt. [default: those of PROMPT, else {TOKENS}]",
        ),
        Range(1, LARGEST),
    ] = None

    def phases(self) -> tuple[Phase, ...]:
        """Those that are shown."""
        return ("prefill", "decode") if self.phase == "both" else (self.phase,)


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """Which tensors, and what is said of them."""

    params: Annotated[
        bool, typer.Option("--params", rich_help_panel=SHAPES, help="Parameters only.")
    ] = False
    activations: Annotated[
        bool,
        typer.Option(
            "--activations", rich_help_panel=SHAPES, help="Activations and the cache only."
        ),
    ] = False
    layer: Annotated[
        str | None,
        typer.Option(
            "--layer",
            metavar="0,3-5",
            rich_help_panel=SHAPES,
            help="These layers only; -1 is the last.",
        ),
    ] = None
    filter: Annotated[
        str | None,
        typer.Option(
            "--filter",
            metavar="GLOB",
            rich_help_panel=SHAPES,
            help="Names only that match: blocks.*.attn.q, blocks.0-3.*, others' names too.",
        ),
    ] = None
    names: Annotated[
        bool,
        typer.Option(
            "--names",
            rich_help_panel=SHAPES,
            help="What each tensor is, its formula, and what others call it.",
        ),
    ] = False

    def asked(self, config: ModelConfig) -> Asked:
        """What of that model is shown; UsageError for layers and names that are not there."""
        from llmcli.anatomy.names import select
        from llmcli.cli.looking import parse_numbers
        from llmcli.families.sources import sources
        from llmcli.measure.shapes import Asked

        kinds: tuple[Kind, ...] = ("parameter", "activation", "state")
        if self.params != self.activations:
            kinds = kinds[:1] if self.params else kinds[1:]
        layers = names = None
        if self.layer is not None:
            layers = parse_numbers(self.layer, len(config.layers), "--layer", "layers")
        if self.filter is not None:
            found = select(self.filter, config, kinds=kinds, sources=sources(config))
            names = frozenset(found)
        return Asked(kinds=kinds, layers=layers, names=names)
