"""`llmcli info`: what a model is, and whether it fits this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from llmcli.errors import UsageError
from llmcli.records.document import members
from llmcli.records.info import Device
from llmcli.records.ranges import LARGEST
from llmcli.shell.options import ModelOptions, ViewOutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import Without, opt
from llmcli.shell.running import (
    check_context,
    chosen_devices,
    note_quantize,
    note_tensors,
    opened_headers,
    unloaded_model,
)

if TYPE_CHECKING:
    from llmcli.prepare.prepared import Prepared

EPILOG = """
Examples:

  llmcli info
  llmcli info -m tiny --batch 8 --context-length 512
  llmcli info -m model.gguf --metadata
  llmcli info -m ./model --dtype bfloat16 --json
  llmcli info -m qwen3-4b --memory 8GiB
  llmcli info --families
"""
HINT = "the file and its configuration belong to different models: fetch both again"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([mgt](?:i?b)?)?", re.IGNORECASE)
_UNITS = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """What is shown, and for how many sequences memory is counted."""

    panel: ClassVar[str] = "Info"
    batch: int = opt(
        1,
        "--batch B",
        "Number of sequences to estimate memory for.",
        at_least=1,
    )
    all: bool = opt(
        False, "--all", "Also FLOPs, special tokens, each stored format, and all parts of memory."
    )
    memory: str | None = opt(
        None,
        "--memory SIZE",
        "Estimate for a GPU with this much free memory, such as 80GiB; with --device cpu, for a "
        "machine with that much.",
    )
    metadata: bool = opt(False, "--metadata", "Every key of the file's own metadata.")
    families: bool = opt(
        False,
        "--families",
        "List the supported families of models.",
        excludes=("--model", "--metadata", "--all", "--memory"),
    )

    def devices(self, name: str) -> tuple[Device, ...]:
        """The devices that memory is counted for. Raises UsageError for a wrong size or device."""
        from llmcli.measure.machine import machine_devices
        from llmcli.prepare.placement import listed

        if self.memory is None:
            return chosen_devices(name, machine_devices())
        found = _SIZE.fullmatch(self.memory)
        free = 0 if found is None else int(float(found[1]) * _UNITS[(found[2] or "G")[0].upper()])
        if not 0 < free < LARGEST:
            raise UsageError(
                f"`--memory {self.memory}` is not a size", hint="give it as in `--memory 80GiB`"
            )
        first, *others = listed(name)
        device = Device(
            device="cuda" if first == "auto" else first,
            name=f"with {self.memory}",
            total_bytes=free,
            free_bytes=free,
            bfloat16=True,
        )
        rest = chosen_devices(",".join(others), machine_devices()) if others else ()
        return (device, *rest)


def command(
    info: InfoOptions,
    model: Annotated[ModelOptions, Without(("edit",))],
    output: ViewOutputOptions,
) -> None:
    """What a model is, and whether it fits the memory of this machine.

    Family, parameters, layers, context, tokenizer, stored formats, bytes: from the configuration
    and the headers of the files alone, so no weights are read and PyTorch is not imported. Memory
    is estimated for a run with `--dtype` at `--context-length` (default: the model's own), and
    compared with what is free.
    """
    from llmcli.commands.info.measure import measure_info, supported_families
    from llmcli.commands.info.report import FamiliesReport
    from llmcli.commands.info.view import render_families, render_info
    from llmcli.prepare.prepared import prepare

    out = Output("info", output)
    if info.families:
        found = FamiliesReport(families=supported_families())
        out.present(lambda: render_families(found.families), members(found))
        return
    devices, shared = info.devices(model.device), dict[str, Any]()
    with opened_headers(model, out) as (checkpoint, place):
        report = measure_info(
            checkpoint,
            devices,
            batch=info.batch,
            context=model.context_length,
            **model.precision_options,
        )
        if report.architecture is not None:
            note_quantize(model, checkpoint, out)
            note_tensors(checkpoint, report.surplus, out)
            if "," in model.device:
                shared = _placed(prepare(checkpoint), devices, model, out)
    report = replace(report, file=replace(report.file, path=place))
    about = unloaded_model(checkpoint, place) | {"family": None}
    if (known := report.architecture) is not None:
        check_context(model, known.context, known.positions, out)
        first = report.memory[0]
        about |= {
            "family": known.family,
            "model_type": known.model_type,
            "parameters": known.parameters.total,
            "context": known.context,
            **first.need.formats,
            "weight_bytes": first.need.weights_bytes,
            "device": first.device.device,
            **shared,
        }
    out.present(
        lambda: render_info(report, full=info.all, metadata=info.metadata),
        members(report) | {"checks": {}},
        model=about,
        checks=report.checks,
        hint=HINT,
    )
    if report.unsupported is not None:
        raise report.unsupported


def _placed(
    prepared: Prepared, devices: Sequence[Device], options: ModelOptions, out: Output
) -> dict[str, Any]:
    """What several devices change in the `model` object; notes which layers each of them has."""
    from llmcli.prepare.placement import place, placement_words

    context = options.context_length
    found = place(prepared, devices, context=context, **options.precision_options)
    out.note(placement_words([one.device for one in devices], found.placed, found.home))
    return {**found.precision.describe(prepared.config), "device": found.devices}
