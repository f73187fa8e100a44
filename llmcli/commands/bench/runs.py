"""How it is measured and shown: llama-bench's options, and ours, which are long ones only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from llmcli.cli.options import OUTPUT, OutputOptions
from llmcli.cli.params import Range
from llmcli.commands.bench.options import option

RUNS, OURS = "Runs", "Beyond llama-bench"

Format = Literal["csv", "json", "jsonl", "md", "sql", "none"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How it is measured and shown."""

    repetitions: Annotated[
        int,
        option(RUNS, "-r", "--repetitions", metavar="N", help="Runs of each test."),
        Range(1, 1_000_000),
    ] = 5
    delay: Annotated[
        float,
        option(RUNS, "--delay", metavar="SECONDS", help="Pause before each test. [default: 0]"),
        Range(0, 86_400),
    ] = 0.0
    no_warmup: Annotated[
        bool, option(RUNS, "--no-warmup", help="No runs before those that count.")
    ] = False
    output: Annotated[
        Format | None,
        option(
            RUNS,
            "-o",
            "--output",
            metavar="FORMAT",
            help="Format on stdout: csv, json, jsonl, md, sql or none. [default: md]",
        ),
    ] = None
    output_err: Annotated[
        Format,
        option(
            RUNS,
            "-oe",
            "--output-err",
            metavar="FORMAT",
            help="Format on stderr, too. [default: none]",
        ),
    ] = "none"
    progress: Annotated[
        bool, option(RUNS, "--progress", help="A line on stderr for every run.")
    ] = False
    verbose: Annotated[
        bool, option(RUNS, "-v", "--verbose", help="Machine, ceilings and loads on stderr.")
    ] = False
    list_devices: Annotated[
        bool, option(RUNS, "--list-devices", help="List the devices, and nothing else.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class OurOptions:
    """What llama-bench has not."""

    against: Annotated[
        Literal["transformers", "llama.cpp"] | None,
        option(
            OURS,
            "--against",
            metavar="ENGINE",
            help="Measure transformers or llama.cpp on "
            "the same weights, too, the runs of both in turns.",
        ),
    ] = None
    random_weights: Annotated[
        bool,
        option(
            OURS,
            "--random-weights",
            help="The model from its configuration alone, its weights drawn with --seed.",
        ),
    ] = False
    seed: Annotated[
        int,
        option(OURS, "--seed", metavar="N", help="Seed of the random tokens. [default: 0]"),
        Range(0, 2**63 - 1),
    ] = 0
    no_ceilings: Annotated[
        bool,
        option(
            OURS,
            "--no-ceilings",
            help="Do not measure what the machine can do at most, "
            "which takes a second; the share of the roofline is left out.",
        ),
    ] = False
    revision: Annotated[
        str | None,
        option(OURS, "--revision", metavar="REV", help="Branch, tag or commit on the hub."),
    ] = None
    quantize: Annotated[
        Literal["auto", "none", "int8", "int4"],
        option(
            OURS, "--quantize", metavar="FORMAT",
            help="Weight format: auto (the file's), none, int8 or int4.",
        ),
    ] = "auto"
    offline: Annotated[
        bool, option(OURS, "--offline", help="Use only what is on this machine.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class BenchOutput(OutputOptions):
    """As everywhere, without `-q`: short options are llama-bench's."""

    quiet: Annotated[bool, option(OUTPUT, "--quiet", help="No progress, notes or warnings.")] = (
        False
    )
