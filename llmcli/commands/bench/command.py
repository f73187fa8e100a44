"""`llmcli bench`: how fast a model runs, in llama-bench's tests, options and formats."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from llmcli.commands.bench.options import (
    BenchOutput,
    OurOptions,
    RunOptions,
    SubjectOptions,
    SweptOptions,
)
from llmcli.errors import UsageError
from llmcli.shell.exits import SIGNALS
from llmcli.shell.options import ModelOptions
from llmcli.shell.output import Output
from llmcli.shell.progress import Progress
from llmcli.shell.running import require_cwd

if TYPE_CHECKING:
    from llmcli.commands.bench.report.results import BenchRequest, BenchRow

CONTEXT = {"token_normalize_func": lambda name: name.replace("_", "-")}  # as llama-bench does
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}
# options of our other commands: what takes their place here
ELSEWHERE = {
    "--max-tokens": "did you mean `-n`, new tokens of a test?",
    "--pairs": "did you mean `-r`, runs of each test?",
    **dict.fromkeys(("--oe", "--output-err"), "rows go to stdout alone: see `-o`"),
    "--list-devices": "`llmcli env` lists the devices",
    "--context-length": "the cache is as long as a test: `-d` tokens that are in it, `-p` and `-n`",
}
EPILOG = """
Examples:

  llmcli bench
  llmcli bench -m tiny -p 64,128 -n 16 -t 1-4*2
  llmcli bench -m model.gguf -pg 512,128 -d 0,1024 -o json
  llmcli bench -m ./config --random-weights --device meta
  llmcli bench --against transformers
  llmcli bench compare before.json after.json --fail-if-slower 5%
"""


def command(
    tests: SubjectOptions,
    swept: SweptOptions,
    runs: RunOptions,
    ours: OurOptions,
    output: BenchOutput,
) -> None:
    """How fast a model reads prompts and writes text: llama-bench's tests, options and formats.

    Every test runs `-r` times on random tokens; shown are the mean of the rates and its standard
    deviation, as llama-bench computes them. Beside them: time to the first token, percentiles of
    the times between tokens, peak memory, load time, and the share of what the machine's
    measured ceilings allow. A configuration that cannot run is a row with its error. Options of
    llama-bench that change nothing here are accepted and ignored.
    """
    from llmcli.commands.bench.request import bench_request, model_names

    out = Output("bench", output)
    _check(runs, ours, output)
    if tests.hf_token:
        os.environ["HF_TOKEN"] = tests.hf_token
    models = model_names(tests)
    request = partial(bench_request, tests=tests, swept=swept, runs=runs, ours=ours)
    request(models or ("",), threads=1)  # refused before anything is imported
    require_cwd()
    with Progress(out, "starting …"), SIGNALS.abrupt():
        import torch
    models = models or (_default_model(ours, runs, out),)
    _run(request(models, threads=torch.get_num_threads()), runs, out)


def _run(request: BenchRequest, runs: RunOptions, out: Output) -> None:
    """Measures, writing each row as it is there, and ends with what the rows have in common."""
    from llmcli.commands.bench.ending import build_info, finish, machine_words
    from llmcli.commands.bench.measure.sweep import sweep
    from llmcli.commands.bench.streams import RowStream, Status
    from llmcli.commands.bench.suppliers import Suppliers
    from llmcli.measure.busy import CpuContention

    by, status = build_info(), Status(out, lines=runs.progress)
    stream = RowStream.of(out, by, request, runs)
    if request.verbose:
        out.note(", ".join(machine_words()))

    def on_row(row: BenchRow) -> None:
        status.erase()
        SIGNALS.check()
        stream.row(row)

    with Suppliers(request, out, status) as suppliers:
        stream.begin()
        busy = CpuContention()
        report = sweep(request, suppliers, on_row=on_row, on_progress=status.said)
        status.erase()
        stream.end()
        load = busy.load(report.cpu_threads)
        report = replace(report, checks=suppliers.checks, machine_load=load)
        finish(report, runs.output, by, request, list(suppliers.models.values()), out)


def _check(runs: RunOptions, ours: OurOptions, output: BenchOutput) -> None:
    """Raises UsageError for what can be refused before anything is looked for."""
    if output.json and runs.output is not None:
        raise UsageError(
            f"`--json` and `-o {runs.output}` are two formats for one stdout",
            hint="`-o json` is llama-bench's array, `--json` one document with everything",
        )
    ModelOptions(quantize=ours.quantize).check()
    if ours.against is not None and find_spec(PACKAGES[ours.against]) is None:
        package = {"llama.cpp": "llama-cpp-python"}.get(ours.against, ours.against)
        raise UsageError(
            f"`--against {ours.against}` needs a package that is not installed",
            hint=f"run `pip install {package}`, then this command again",
        )


def _default_model(ours: OurOptions, runs: RunOptions, out: Output) -> str:
    """The name of the model where none is named; fetched if it has to be, `tiny` if it cannot.

    `-o json` is an array of rows, an empty one, even where this is interrupted.
    """
    from llmcli.checkpoints.locate import find

    try:
        with Progress(out) as progress:
            return find(
                None,
                revision=ours.revision,
                offline=ours.offline,
                progress=progress,
                note=out.note,
            )[0]
    except KeyboardInterrupt:
        if runs.output == "json":
            out.write("[]\n")
        raise
