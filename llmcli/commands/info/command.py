"""`llmcli info`: what a model is, and whether it fits this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from llmcli.cli.headers import chosen_devices, opened_headers
from llmcli.cli.options import ModelOptions, OutputOptions
from llmcli.cli.output import Output, require
from llmcli.cli.params import LARGEST, opt
from llmcli.errors import UsageError
from llmcli.observe.environment import environment

if TYPE_CHECKING:
    from llmcli.reports.info import ModelFacts

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

    panel: ClassVar[str] = "Info"
    batch: int = opt(
        1, "--batch", "B",
        "Sequences at a time that memory is counted for.", at_least=1, at_most=LARGEST,
    )  # fmt: skip
    metadata: bool = opt(False, "--metadata", "Every key of the file's own metadata.")
    families: bool = opt(False, "--families", "The families of models that can be run.")


def command(info: InfoOptions, model: ModelOptions, output: OutputOptions) -> None:
    """What a model is, and whether it fits the memory of this machine.

    Family, parameters, layers, context, tokenizer, stored formats, bytes: from the configuration
    and the headers of the files alone, so no weights are read and PyTorch
    is not imported. Memory is that of a run with `--dtype` at `--context-length` (default: the
    model's own), against what this machine has free.
    """
    out = Output("info", output)
    if info.families:
        for flag, given in (("-m", model.model is not None), ("--metadata", info.metadata)):
            if given:
                raise UsageError(
                    f"`--families` is about no model and goes without `{flag}`",
                    hint="leave one of them out",
                )
        _families(out)
        return
    from llmcli.commands.info.measure import measure_info
    from llmcli.observe.memory import machine_devices

    devices = chosen_devices(model.device, machine_devices())
    with opened_headers(model, out) as (checkpoint, place):
        report = measure_info(
            checkpoint,
            devices,
            dtype=model.dtype,
            quantize=model.quantize,
            batch=info.batch,
            context=model.context_length,
        )
    report = replace(report, file=replace(report.file, path=place))
    _check_context(model.context_length, report.model, out)
    if out.json:
        from llmcli.commands.info.document import info_document, model_object

        out.document(info_document(report), model=model_object(report), environment=environment())
    else:
        from llmcli.commands.info.view import render_info

        out.show(render_info(report, metadata=info.metadata))
    require(
        report.checks,
        "the file and its configuration belong to different models: fetch both again",
    )


def _families(out: Output) -> None:
    from llmcli.commands.info.measure import supported_families

    families = supported_families()
    if out.json:
        out.document({"families": families}, model=None, environment=environment())
        return
    from llmcli.commands.info.view import render_families

    out.show(render_families(families))


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
