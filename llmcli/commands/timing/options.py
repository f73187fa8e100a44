"""What `llmcli timing` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from llmcli.anatomy.counts import PROMPT_CHUNK
from llmcli.cli.files import check_size, kind_of_file
from llmcli.cli.params import Range
from llmcli.commands.timing.view.trace import trace_size
from llmcli.errors import UsageError

TIMING = "Timing"


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """What is run how often, what is shown of it, and where the trace goes."""

    phase: Annotated[
        Literal["prefill", "decode", "both"],
        typer.Option(
            "--phase",
            metavar="PHASE",
            rich_help_panel=TIMING,
            help="Time reading the prompt (prefill), writing after it (decode), or both.",
        ),
    ] = "both"
    max_tokens: Annotated[
        int,
        typer.Option(
            "-n",
            "--max-tokens",
            metavar="N",
            rich_help_panel=TIMING,
            help="Tokens that are written after the prompt, end of text or not.",
        ),
        Range(1),
    ] = 16
    pairs: Annotated[
        int,
        typer.Option(
            "--pairs",
            metavar="N",
            rich_help_panel=TIMING,
            help="Runs with clocks, and as many without, in turns; the median one is shown.",
        ),
        Range(1, 10_000),
    ] = 10
    layers: Annotated[
        bool,
        typer.Option("--layers", rich_help_panel=TIMING, help="Also the parts of every layer."),
    ] = False
    unfused: Annotated[
        bool,
        typer.Option(
            "--unfused",
            rich_help_panel=TIMING,
            help="Also compute in pieces what a fused kernel does at once, and time these apart.",
        ),
    ] = False
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            rich_help_panel=TIMING,
            help="Write the run to FILE.json, for ui.perfetto.dev or chrome://tracing.",
        ),
    ] = None
    force: Annotated[
        bool,
        typer.Option(
            "--force", rich_help_panel=TIMING, help="Write the trace however large it gets."
        ),
    ] = False

    def check(self) -> None:
        """Raises UsageError or WriteFailed for what can be refused before anything is loaded."""
        if self.trace is not None:
            kind_of_file(self.trace, ("json",), option="--trace")
        elif self.force:
            raise UsageError(
                "`--force` is about the size of a file, and none is written",
                hint="add `--trace FILE.json`, or leave it out",
            )

    def check_trace(self, layers: int, tokens: int) -> None:
        """Raises UsageError or WriteFailed where the trace of a run gets too large.

        Of a prompt of so many `tokens`.
        """
        if self.trace is not None:
            calls = self.new_tokens
            if "prefill" in self.phases:
                calls += -(-tokens // PROMPT_CHUNK)
            smaller = "write fewer tokens with --max-tokens"
            nbytes = trace_size(layers, calls)
            check_size(self.trace, nbytes, force=self.force, smaller=smaller)

    @property
    def phases(self) -> tuple[Literal["prefill", "decode"], ...]:
        """The phases that are timed."""
        return ("prefill", "decode") if self.phase == "both" else (self.phase,)

    @property
    def new_tokens(self) -> int:
        """How many are written: none where only reading is timed."""
        return 0 if self.phase == "prefill" else self.max_tokens
