"""`llmcli load`: what becomes of every tensor, how long it takes, and whether it can be trusted."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.names import parse
from llmcli.cli.exits import SIGNALS
from llmcli.cli.options import ModelOptions, OutputOptions
from llmcli.cli.output import Output
from llmcli.cli.progress import Progress
from llmcli.cli.running import kernels_of, need_directory
from llmcli.commands.load.document import load_document
from llmcli.commands.load.options import LoadOptions, check_options, chosen
from llmcli.commands.load.report import LoadReport
from llmcli.errors import CheckpointError, NotFinite, WeightMismatch
from llmcli.observe.environment import environment
from llmcli.reports.info import NO_FORMATS

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint

EPILOG = """
Examples:

  llmcli load
  llmcli load -m model.gguf --filter "blocks.0.*"
  llmcli load -m ./model --dtype float16
  llmcli load -m adapter.safetensors --check && echo whole
"""


class _Unfit(CheckpointError):
    """What does not fit, which the view on stdout has."""

    told = True


class _Told(NotFinite):
    """Numbers that are not finite, which the view on stdout has."""

    told = True


def command(load: LoadOptions, model: ModelOptions, output: OutputOptions) -> None:
    """Load a model and tell what became of every tensor of its files.

    Each tensor with the parameter that it fills, or why it is dropped; what was done to it, and
    what its numbers are like; the time and the bytes a second of each stage, and peak memory.
    What files claim of their weights is held against what they have. NaN and infinity exit 7,
    what does not fit or is not as it is said to be exits 4.
    """
    out = Output("load", output)
    check_options(load, model)
    model.check()
    checkpoint, stages = _opened(model, out)
    if not load.check:
        _require_known(checkpoint)
    stages["import"] = _import_torch(checkpoint, model, out)
    if load.check:
        report = _checked(checkpoint, stages, out)
        _show(report, _about(checkpoint), load, out)
        _judge(report, model)
        return
    try:
        report, about = _loaded(checkpoint, stages, model, out)
    except WeightMismatch as error:
        error.hint = f"{error.hint}; `llmcli load{_named(model)} --check` looks at what is here"
        raise
    _show(report, about, load, out)
    _judge(report, model)


def _opened(model: ModelOptions, out: Output) -> tuple[Checkpoint, dict[str, float]]:
    """The checkpoint, and the seconds of what comes before its weights."""
    from llmcli.checkpoints import open_checkpoint
    from llmcli.checkpoints.locate import find

    begin = perf_counter()
    with Progress(out) as progress:
        name, path = find(
            model.model, revision=model.revision, offline=model.offline, progress=progress,
            note=out.note,
        )  # fmt: skip
    found = perf_counter()
    checkpoint = open_checkpoint(path, name=name)
    return checkpoint, {"find": found - begin, "headers": perf_counter() - found}


def _require_known(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError without a configuration, and the errors of `describe`."""
    from llmcli.families import describe

    if checkpoint.config is None:
        raise CheckpointError(
            f"`{checkpoint.name}` has no `config.json` beside its weights, so no model is known",
            hint="put the model's config.json into the same directory, or look at the tensors "
            "alone with --check",
        )
    describe(checkpoint)


def _import_torch(checkpoint: Checkpoint, model: ModelOptions, out: Output) -> float:
    """Imports what loading takes; the seconds that it took."""
    need_directory()
    begin = perf_counter()
    with Progress(out, f"loading {checkpoint.name} …"), SIGNALS.abrupt():
        import torch

        import llmcli.commands.load.measure.run  # noqa: F401
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    return perf_counter() - begin


def _loaded(
    checkpoint: Checkpoint, before: dict[str, float], model: ModelOptions, out: Output
) -> tuple[LoadReport, dict[str, Any]]:
    from llmcli.commands.load.measure.run import measure_load

    with Progress(out, f"loading {checkpoint.name} …") as progress:
        loaded, report = measure_load(
            checkpoint, _stages(before), device=model.device, dtype=model.dtype,
            quantize=model.quantize, progress=progress,
        )  # fmt: skip
    SIGNALS.check()
    return report, loaded.describe()


def _checked(checkpoint: Checkpoint, before: dict[str, float], out: Output) -> LoadReport:
    from llmcli.commands.load.measure.run import check_files

    with Progress(out, f"looking through {checkpoint.name} …") as progress:
        report = check_files(checkpoint, _stages(before), progress=progress)
    SIGNALS.check()
    return report


def _stages(before: dict[str, float]) -> Any:
    from llmcli.model import Stages

    stages = Stages()
    for name, seconds in before.items():
        stages.add(name, seconds)
    return stages


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    """The `model` object where nothing was loaded."""
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "stored_formats": sorted({info.format for info in checkpoint.tensors.values()}),
        **NO_FORMATS,
    }


def _show(report: LoadReport, about: dict[str, Any], load: LoadOptions, out: Output) -> None:
    lines = chosen(report, load)
    if out.json:
        kernels = () if load.check else kernels_of(about)
        body = load_document(report, lines if load.filter is not None else report.lines)
        out.document(body, model=about, environment=environment(kernels=kernels))
        return
    from llmcli.commands.load.view.screen import render_check, render_load
    from llmcli.ui.stats import model_line

    if load.check:
        out.show(render_check(report, about["name"]))
    else:
        brief = load.filter is not None
        out.show(render_load(report, model_line(about), lines, brief=brief))


def _named(model: ModelOptions) -> str:
    """` -m X` as it was given, nothing for the model that is usual."""
    return "" if model.model is None else f" -m {quote(model.model)}"


def _again(model: ModelOptions) -> str:
    """How to get a model once more whose file has such numbers."""
    given = model.model
    if given is None or isinstance(parse(given), Path):
        return "the file has such numbers: fetch it again, or another one"
    return (
        f"the file has such numbers: `llmcli models rm {quote(given)}` and load it again, or use "
        "another model"
    )


def _judge(report: LoadReport, model: ModelOptions) -> None:
    """Raises CheckpointError for what does not fit or is not so, NotFinite for NaN and infinity."""
    if report.fault:
        raise _Unfit(report.fault, hint=report.hint)
    wrong = [
        *(
            f"{claim.what} says {claim.says}, but it is {claim.holds}"
            for claim in report.claims
            if claim.must and not claim.ok
        ),
        *(f"it is not so that {check.words}" for check in report.checks if not check.ok),
    ]
    if wrong:
        raise _Unfit(wrong[0])
    if report.not_finite:
        half = report.dtype == "float16"  # which infinity may come from, and NaN may not
        hint = None if half else _again(model)
        raise _Told(report.not_finite, hint=hint, dtype=report.dtype or "")
