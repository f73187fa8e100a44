"""The options that commands share, as dataclasses: declared once, documented once.

A command names the dataclasses it wants; `params.flatten` spreads them out. The panel
(`rich_help_panel`) is the heading under which our help lists the option.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import typer

from llmcli.cli.params import Range
from llmcli.errors import UsageError
from llmcli.kernels import native

MODEL, PROMPT, OUTPUT = "Model", "Prompt", "Output"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, where it runs and in which arithmetic."""

    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            rich_help_panel=MODEL,
            help="A catalog name (smollm2, tiny), a path to a directory, .gguf or .safetensors, "
            "or org/name[@rev] on the hub. [default: $LLMCLI_MODEL, else smollm2]",
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="DEVICE",
            rich_help_panel=MODEL,
            help="auto, cpu, cuda, cuda:1 … or mps.",
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float64", "float32", "bfloat16", "float16"],
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            rich_help_panel=MODEL,
            help="Arithmetic: auto, float64, float32, bfloat16 or float16.",
        ),
    ] = "auto"
    quantize: Annotated[
        Literal["auto", "none", "int8", "int4"],
        typer.Option(
            "--quantize",
            metavar="FORMAT",
            rich_help_panel=MODEL,
            help="Weight format: auto (the file's), none, int8 or int4.",
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            rich_help_panel=MODEL,
            help="CPU threads. [default: OMP_NUM_THREADS, else one per core]",
        ),
        Range(1, 4096),
    ] = None
    context_length: Annotated[
        int | None,
        typer.Option(
            "--context-length",
            metavar="N",
            rich_help_panel=MODEL,
            help="Most tokens that prompt and text may have. [default: the model's own]",
        ),
        Range(1),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            rich_help_panel=MODEL,
            help="Seed of everything random. [default: one is drawn and reported]",
        ),
        Range(0, 2**63 - 1),
    ] = None
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            rich_help_panel=MODEL,
            help="The model from its configuration alone, its weights drawn with --seed "
            "(everything with 0 where that is not given).",
        ),
    ] = False
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="REV",
            rich_help_panel=MODEL,
            help="Branch, tag or commit on the hub.",
        ),
    ] = None
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", rich_help_panel=MODEL, help="Use only what is on this machine."
        ),
    ] = False

    def check(self) -> None:
        """Raises UsageError for what can be refused before anything is loaded."""
        native.check()

    def proving(self) -> ModelOptions:
        """These options for a command that proves numbers: float32, or float64 on request.

        Raises UsageError for an arithmetic whose rounding hides a wrong number.
        """
        self.require_exact()
        return replace(self, dtype="float32") if self.dtype == "auto" else self

    def require_exact(self) -> None:
        """Raises UsageError for an arithmetic whose rounding hides a wrong number."""
        if self.dtype in ("bfloat16", "float16"):
            raise UsageError(
                f"`--dtype {self.dtype}` rounds too coarsely to prove that numbers are equal",
                hint="use float32 or float64",
            )

    @property
    def weights_seed(self) -> int | None:
        """The seed of random weights, None where the checkpoint's own are used."""
        return (self.seed or 0) if self.random_weights else None

    def sampling_seed(self) -> tuple[int, bool]:
        """The seed of the text, and whether it was drawn for this run.

        Random weights without a seed take 0 for both: a drawn one could not be given again
        without changing the weights too.
        """
        if self.seed is not None or self.random_weights:
            return self.seed or 0, False
        return secrets.randbelow(2**31), True


@dataclass(frozen=True, kw_only=True)
class GivenPromptOptions:
    """Where the text comes from: PROMPT, a file, or token ids; stdin is read for `-` only."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The text; `-` reads stdin.")
    ] = None
    file: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--file",
            metavar="PATH",
            rich_help_panel=PROMPT,
            help="Read the text from a file (`-`: stdin). A .json file with `messages` is a "
            "conversation.",
        ),
    ] = None
    ids: Annotated[
        str | None,
        typer.Option(
            "--ids",
            metavar="1,2,3",
            rich_help_panel=PROMPT,
            help="Token ids instead of text, separated by commas or spaces.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions(GivenPromptOptions):
    """The same for commands that read a pipe without being asked."""

    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]",
            help="The text; a pipe is put before it, and `-` reads stdin whatever it is.",
        ),
    ] = None
    no_stdin: Annotated[
        bool,
        typer.Option("--no-stdin", rich_help_panel=PROMPT, help="Never read a pipe on stdin."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is written where; `main` also looks at these for errors."""

    json: Annotated[
        bool,
        typer.Option("--json", rich_help_panel=OUTPUT, help="One JSON document on stdout."),
    ] = False
    quiet: Annotated[
        bool,
        typer.Option(
            "-q", "--quiet", rich_help_panel=OUTPUT, help="No progress, notes or warnings."
        ),
    ] = False
    debug: Annotated[
        bool,
        typer.Option("--debug", rich_help_panel=OUTPUT, help="Tracebacks with error messages."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SpecialOptions:
    """How special tokens that are written in the text are read."""

    no_special: Annotated[
        bool,
        typer.Option(
            "--no-special",
            rich_help_panel=PROMPT,
            help="Special tokens written in the text are plain text.",
        ),
    ] = False
