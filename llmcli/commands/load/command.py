"""`llmcli load`: what becomes of every tensor, how long it takes, and whether it can be trusted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from llmcli.errors import CheckFailed, CheckpointError, NotFinite, UsageError, WeightMismatch
from llmcli.records.document import checks_document, members
from llmcli.records.numbers import did_you_mean
from llmcli.records.work import LoadTimings
from llmcli.shell.exits import SIGNALS
from llmcli.shell.options import ModelOptions, ViewOutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import Without, opt
from llmcli.shell.progress import Progress
from llmcli.shell.running import (
    header,
    note_quantize,
    note_tensors,
    opened,
    require_cwd,
    unloaded_model,
)

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint
    from llmcli.commands.load.report import LoadReport
    from llmcli.records.ledger import LedgerEntry

EPILOG = """
Examples:

  llmcli load
  llmcli load -m model.gguf --filter "blocks.0.*"
  llmcli load -m ./model --dtype float16
  llmcli load -m adapter.safetensors --check && echo readable
"""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How much is shown."""

    panel: ClassVar[str] = "Load"
    check: bool = opt(
        False,
        "--check",
        "Only check the stored values: no model is built, so any file of tensors will do.",
        excludes=("--dtype", "--quantize", "--activations", "--cache-type", "--device"),
    )
    all: bool = opt(
        False,
        "--all",
        "A line for every tensor of every layer, with its statistics, and for every stage.",
    )
    filter: str | None = opt(
        None, "--filter GLOB", "Only the lines of these parameters or tensors, such as blocks.0.*."
    )


def chosen(report: LoadReport, load: LoadOptions) -> Sequence[LedgerEntry]:
    """The requested lines; raises UsageError for a pattern that matches none."""
    from llmcli.graph.names import near_ends

    if load.filter is None:
        return report.ledger if load.all else report.rows
    pattern = load.filter
    named = [(line, list(filter(None, (line.parameter, line.source)))) for line in report.ledger]
    found = [line for line, names in named if any(fnmatchcase(name, pattern) for name in names)]
    if not found:
        names = [name for _, names in named for name in names]
        near = get_close_matches(pattern, names, n=1, cutoff=0.75)
        if not near:  # a name without where it is, in all blocks
            ends = near_ends(pattern.strip("*."), names)
            near = [re.sub(r"^blocks\.\d+\.", "blocks.*.", name) for name in ends[:1]]
        raise UsageError(
            f"no parameter and no tensor is called `{pattern}`",
            hint=did_you_mean(near, f"for example `{names[0]}`"),
        )
    return found


def command(
    load: LoadOptions,
    model: Annotated[ModelOptions, Without(("random_weights", "edit"))],
    output: ViewOutputOptions,
) -> None:
    """Load a model and report what became of every tensor of its files.

    Each tensor with the parameter that it fills, or why it is dropped; how it was converted, and
    statistics of its values; time and throughput of each stage, and peak memory. What the files
    declare about their weights is compared with what they contain. NaN and infinity exit 7, tensors
    that do not fit and wrong declarations exit 4; with --check, extreme outliers within a tensor
    exit 1.
    """
    from llmcli.commands.load.view import render_load
    from llmcli.ui.facts import model_line

    out = Output("load", output)
    model.check()
    stages = LoadTimings()
    checkpoint = _opened(load, model, stages, out)
    report, about = _measured(checkpoint, stages, load, model, out)
    lines, brief = chosen(report, load), load.filter is not None
    document = members(replace(report, ledger=tuple(lines)) if brief else report)
    out.present(
        lambda: render_load(
            report,
            about["name"] if load.check else model_line(about),
            lines if load.all or brief or not load.check else None,
            brief=brief,
            full=load.all,
            checks=out.checks or load.check,
        ),
        document | {"checks": checks_document(report.checks)},
        **({"model": about} if load.check else header(about)),
    )
    _judge(report, model)


def _opened(load: LoadOptions, model: ModelOptions, stages: LoadTimings, out: Output) -> Checkpoint:
    """The checkpoint, and PyTorch imported; raises the errors of `describe` unless `load.check`."""
    from llmcli.families import describe

    begin = perf_counter()
    checkpoint, headers_s = opened(model, out)
    stages.add("find", perf_counter() - begin - headers_s)
    stages.add("headers", headers_s)
    try:
        if not load.check:
            describe(checkpoint)
    except CheckpointError as error:
        if checkpoint.config is None:
            error.hint = f"{error.hint}, or check the tensors alone with --check"
        raise
    require_cwd()
    with stages("import"), Progress(out, f"loading {checkpoint.name} …"), SIGNALS.abrupt():
        import torch

        import llmcli.commands.load.measure.run  # noqa: F401
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    return checkpoint


def _measured(
    checkpoint: Checkpoint, stages: LoadTimings, load: LoadOptions, model: ModelOptions, out: Output
) -> tuple[LoadReport, dict[str, Any]]:
    """The report, and the `model` object of the document."""
    from llmcli.commands.load.measure.run import check_files, measure_load

    doing = "checking" if load.check else "loading"
    with Progress(out, f"{doing} {checkpoint.name} …") as progress:
        if load.check:
            report = check_files(checkpoint, stages, progress=progress)
            about = unloaded_model(checkpoint, str(checkpoint.path))
        else:
            try:
                loaded, report = measure_load(
                    checkpoint, stages, device=model.device, progress=progress,
                    **model.precision_options,
                )
            except WeightMismatch as error:
                named = "" if model.model is None else f" -m {quote(model.model)}"
                error.hint = f"{error.hint}; `llmcli load{named} --check` checks the files alone"
                raise
            about = loaded.describe()
    SIGNALS.check()
    if not load.check:
        note_quantize(model, checkpoint, out)
        note_tensors(checkpoint, loaded.ledger.surplus, out)
    return report, about


def _refetch(model: ModelOptions) -> str:
    """How to get a model again whose file has impossible numbers."""
    from llmcli.checkpoints.names import parse

    given = model.model
    if given is None or isinstance(parse(given), Path):
        return "fetch it again, or another one"
    return f"`llmcli models rm {quote(given)}` and load it again, or use another model"


def _judge(report: LoadReport, model: ModelOptions) -> None:
    """Raises CheckpointError for what does not fit or is wrong, NotFinite, else CheckFailed."""
    from llmcli.commands.load.report import OUTLIERS

    if report.error is not None:
        raise report.error
    failed = [check for check in report.checks if not check.ok]
    false = [claim for claim in report.claims if claim.must and not claim.ok]
    wrong = [f"{one.what}: claimed {one.says}, actual {one.holds}" for one in false]
    wrong += [f"check failed: {check.words}" for check in failed if check.name != OUTLIERS]
    if wrong:
        raise CheckpointError(wrong[0])
    if report.not_finite:
        half = report.dtype == "float16"  # which infinity may come from, and NaN may not
        hint = None if half else f"the file has such numbers: {_refetch(model)}"
        raise NotFinite(report.not_finite, hint=hint, dtype=report.dtype or "")
    for check in failed:
        raise CheckFailed(
            f"the numbers from {check.where} on are outliers in that tensor: the file is damaged",
            hint=_refetch(model),
        )
