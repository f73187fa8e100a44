"""`llmcli bench`: how fast a model runs, in llama-bench's tests, options and formats."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from llmcli.cli.exits import SIGNALS
from llmcli.cli.options import ModelOptions
from llmcli.cli.output import Output
from llmcli.cli.progress import Progress
from llmcli.cli.running import need_directory
from llmcli.commands.bench.ending import finish, machine_words
from llmcli.commands.bench.options import SubjectOptions, SweptOptions
from llmcli.commands.bench.runs import BenchOutput, OurOptions, RunOptions
from llmcli.commands.bench.settings import Plan, model_names, planned
from llmcli.commands.bench.unused import UnusedOptions, unused_names
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.commands.bench.report.results import BenchRow
    from llmcli.commands.bench.view.markdown import Shown

CONTEXT = {"token_normalize_func": lambda name: name.replace("_", "-")}  # as llama-bench does
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}
# options of our other commands: what takes their place here
ELSEWHERE = {
    "--max-tokens": "did you mean `-n`, new tokens of a test?",
    "--pairs": "did you mean `-r`, runs of each test?",
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
    unused: UnusedOptions,
    output: BenchOutput,
) -> None:
    """How fast a model reads prompts and writes text: llama-bench's tests, options and formats.

    Every test runs `-r` times on random tokens; shown are the mean of the rates and its standard
    deviation, as llama-bench computes them. Beside them: time to the first token, percentiles of
    the times between tokens, peak memory, load time, and the share of what the machine's
    measured ceilings allow. A configuration that cannot run is a row with its error.
    """
    out = Output("bench", output)
    _check(runs, ours, output)
    if runs.list_devices:
        from llmcli.commands.bench.devices import device_lines

        out.write("".join(device_lines()))
        return
    if tests.hf_token:
        os.environ["HF_TOKEN"] = tests.hf_token
    models = model_names(tests)
    planned(models or ("",), 1, tests, swept, unused)  # refused before anything is imported
    need_directory()
    with Progress(out, "starting …"), SIGNALS.abrupt():
        import torch
    found = models or (_default_model(ours, runs, out),)
    plan = planned(found, torch.get_num_threads(), tests, swept, unused)
    _note_unused(unused, out)
    _measure(plan, runs, ours, out)


def _measure(plan: Plan, runs: RunOptions, ours: OurOptions, out: Output) -> None:
    """Runs the sweep, and writes what comes of it."""
    from llmcli.commands.bench.build import bencher
    from llmcli.commands.bench.measure.plan import needed
    from llmcli.commands.bench.measure.sweep import sweep
    from llmcli.commands.bench.run import Suppliers
    from llmcli.commands.bench.streams import Status, Streams, make_writer
    from llmcli.observe.busy import Busy

    by, shown = bencher(), _shown(plan, ours)
    format = "none" if out.json else runs.output or "md"
    streams = Streams(out, make_writer(format, by, shown), make_writer(runs.output_err, by, shown))
    status = Status(out, lines=runs.progress)
    shapes = all(settings.device == "meta" for settings in plan.configurations)
    if runs.verbose:
        out.note(", ".join(machine_words()))

    def on_row(row: BenchRow) -> None:
        status.erase()
        SIGNALS.check()
        streams.row(row)

    longest = max(needed(test) for test in plan.tests)
    with Suppliers(
        ours, out, status, verbose=runs.verbose, shapes=shapes, longest=longest
    ) as suppliers:
        streams.begin()
        busy = Busy()
        report = sweep(
            plan.configurations,
            plan.tests,
            repetitions=runs.repetitions,
            warmup=not runs.no_warmup,
            delay_s=runs.delay,
            seed=ours.seed,
            load=suppliers.load,
            peer=suppliers.peer if ours.against is not None else None,
            peer_name=ours.against or "transformers",
            ceilings=suppliers.ceilings,
            on_row=on_row,
            on_progress=status.said,
            known=suppliers.known,
        )
        status.erase()
        streams.end()
        computing = [row.settings.n_threads for row in report.rows if _on_cpu(row)]
        load = busy.load(max(computing, default=1))
        report = replace(report, checks=suppliers.checks, machine_load=load)
        finish(report, format, by, suppliers, ours, out)


def _on_cpu(row: BenchRow) -> bool:
    return row.ran is not None and row.ran.device == "cpu"


def _check(runs: RunOptions, ours: OurOptions, output: BenchOutput) -> None:
    """Raises UsageError for what can be refused before anything is looked for."""
    if output.json and runs.output is not None:
        raise UsageError(
            f"`--json` and `-o {runs.output}` are two formats for one stdout",
            hint="`-o json` is llama-bench's array, `--json` one document with everything",
        )
    if output.json and runs.list_devices:
        raise UsageError("`--list-devices` is for people and goes without `--json`")
    ModelOptions(quantize=ours.quantize).check()
    if ours.against is not None and find_spec(PACKAGES[ours.against]) is None:
        package = {"llama.cpp": "llama-cpp-python"}.get(ours.against, ours.against)
        raise UsageError(
            f"`--against {ours.against}` needs a package that is not installed",
            hint=f"run `pip install {package}`, then this command again",
        )


def _default_model(ours: OurOptions, runs: RunOptions, out: Output) -> str:
    """The name of the model where none is named; fetched if it has to be, `tiny` if it cannot.

    An array of rows is one, too, where that is interrupted.
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


def _note_unused(unused: UnusedOptions, out: Output) -> None:
    names = unused_names(unused)
    if names:
        listed = ", ".join(f"`{name}`" for name in names)
        out.note(f"{listed} {'has' if len(names) == 1 else 'have'} no effect here")


def _shown(plan: Plan, ours: OurOptions) -> Shown:
    """Which columns the Markdown table has: of a GPU, of a CPU, of what varies."""
    from llmcli.commands.bench.view.markdown import Shown
    from llmcli.devices import resolve_device

    def gpu(device: str, layers: int) -> bool:
        if device == "auto":
            return layers != 0 and resolve_device("auto").type != "cpu"
        return device.partition(":")[0] in ("cuda", "mps")

    found = {gpu(settings.device, settings.n_gpu_layers) for settings in plan.configurations}
    return Shown(
        settings=plan.configurations,
        default=plan.default,
        gpu=True in found,
        cpu=False in found,
        engines=ours.against is not None,
    )
