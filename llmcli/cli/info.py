"""`llmcli info`: what a model is, and whether it fits this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.cli.options import ModelOptions, OutputOptions
from llmcli.cli.output import Output
from llmcli.cli.params import LARGEST, Range
from llmcli.cli.progress import Progress
from llmcli.cli.running import open_checkpoint_of
from llmcli.errors import CheckFailed, NetworkError, UsageError
from llmcli.measure.environment import environment

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint
    from llmcli.reports.info import Device, InfoReport, ModelFacts

EPILOG = """
Examples:

  llmcli info
  llmcli info -m tiny --batch 8 --context-length 512
  llmcli info -m model.gguf --metadata
  llmcli info -m ./model --dtype bfloat16 --json
  llmcli info --families
"""


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """What is asked about."""

    batch: Annotated[
        int,
        typer.Option(
            "--batch",
            metavar="B",
            rich_help_panel="Info",
            help="Sequences at a time that memory is counted for.",
        ),
        Range(1, LARGEST),
    ] = 1
    metadata: Annotated[
        bool,
        typer.Option(
            "--metadata", rich_help_panel="Info", help="Every key of the file's own metadata."
        ),
    ] = False
    families: Annotated[
        bool,
        typer.Option(
            "--families", rich_help_panel="Info", help="The families of models that can be run."
        ),
    ] = False


def command(info: InfoOptions, model: ModelOptions, output: OutputOptions) -> None:
    """What a model is, and whether it fits the memory of this machine.

    Family, parameters, layers, context, tokenizer, stored formats, bytes: from the configuration
    and the headers of the files alone, so no weights are read and PyTorch
    is not imported. Memory is that of a run with `--dtype` at `--context-length` (default: the
    model's own), against what this machine has free.
    """
    out = Output("info", output)
    if info.families:
        _families(out)
        return
    from llmcli.measure.info import measure_info
    from llmcli.measure.memory import machine_devices

    devices = _chosen(model.device, machine_devices())
    with _opened(model, out) as (checkpoint, place):
        report = measure_info(
            checkpoint,
            devices,
            dtype=model.dtype,
            batch=info.batch,
            context=model.context_length,
        )
    report = replace(report, file=replace(report.file, path=place))
    _check_context(model.context_length, report.model, out)
    if out.json:
        from llmcli.cli.info_document import info_document, model_object

        out.document(info_document(report), model=model_object(report), environment=environment())
    else:
        from llmcli.render.info import render_info

        out.show(render_info(report, metadata=info.metadata))
    _require_checks(report)


@contextmanager
def _opened(model: ModelOptions, out: Output) -> Iterator[tuple[Checkpoint, str]]:
    """The checkpoint and where it is; for one on the hub that is not here, its headers alone."""
    try:
        checkpoint = open_checkpoint_of(model, out)
    except NetworkError:
        from llmcli.checkpoints import open_checkpoint
        from llmcli.checkpoints.catalog import offline_from_environment
        from llmcli.checkpoints.headers import fetched_headers, on_the_hub
        from llmcli.checkpoints.locate import default_model

        spec = model.model or default_model()
        found = on_the_hub(spec, model.revision)
        if found is None or model.offline or offline_from_environment():
            raise
        with Progress(out) as progress, fetched_headers(found, progress=progress) as (path, commit):
            yield open_checkpoint(path, name=spec), f"{found.repository}@{commit} on the hub"
        return
    yield checkpoint, str(checkpoint.path)


def _families(out: Output) -> None:
    from llmcli.measure.info import supported_families

    families = supported_families()
    if out.json:
        out.document({"families": families}, model=None, environment=environment())
        return
    from llmcli.render.info import render_families

    out.show(render_families(families))


def _chosen(name: str, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices to compare with, the one that a run would use first.

    Raises UsageError for a device that is not there.
    """
    if name == "auto":
        return tuple(sorted(devices, key=lambda device: not device.usable))
    asked = "cuda:0" if name == "cuda" else name
    found = tuple(device for device in devices if device.device == asked)
    if not found:
        there = ", ".join(device.device for device in devices)
        raise UsageError(f"there is no device `{name}` here", hint=f"there is: {there}")
    return found


def _check_context(wanted: int | None, model: ModelFacts | None, out: Output) -> None:
    """A longer context than the model's own: a note, or UsageError where it cannot exist."""
    if wanted is None or model is None or wanted <= model.context:
        return
    if model.positions is not None and wanted > model.positions:
        raise UsageError(
            f"`--context-length {wanted}` is more than the {model.positions} positions that the "
            "model has learned",
            hint=f"use at most {model.positions}",
        )
    out.note(f"the model was trained for {model.context} tokens, fewer than {wanted}")


def _require_checks(report: InfoReport) -> None:
    """Raises CheckFailed for the first check that does not hold; the view has said so."""
    for check in report.checks:
        if not check.ok:
            where = f" (`{check.where}`)" if check.where else ""
            raise CheckFailed(
                f"not so: {check.words}{where}",
                hint="the file and its configuration belong to different models: fetch both again",
            )
