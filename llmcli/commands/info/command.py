"""`llmcli info`: what a model is, and whether it fits this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from llmcli.errors import UsageError
from llmcli.measure.environment import environment
from llmcli.shell.headers import chosen_devices, opened_headers
from llmcli.shell.options import ModelOptions, ViewOutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import LARGEST, opt
from llmcli.shell.running import note_quantize, note_tensors

if TYPE_CHECKING:
    from llmcli.commands.info.report import InfoReport, ModelFacts
    from llmcli.records.info import Device

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
_WHOLE_LIST = 16  # entries of metadata that are written in full


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """What is shown, and for how many sequences memory is counted."""

    panel: ClassVar[str] = "Info"
    batch: int = opt(
        1, "--batch", "B",
        "Sequences at a time that memory is counted for.", at_least=1, at_most=LARGEST,
    )  # fmt: skip
    all: bool = opt(
        False, "--all",
        "Also FLOPs, special tokens, each stored format, and all parts of memory.",
    )  # fmt: skip
    memory: str | None = opt(
        None, "--memory", "SIZE",
        "Count for a GPU that is not here, with so much free memory, as in 80GiB; with --device "
        "cpu for another machine's memory.",
    )  # fmt: skip
    metadata: bool = opt(False, "--metadata", "Every key of the file's own metadata.")
    families: bool = opt(False, "--families", "The families of models that can be run.")

    def check(self, model: ModelOptions) -> None:
        """Raises UsageError for options that `--families` does not take."""
        given = {"-m": model.model is not None, "--metadata": self.metadata, "--all": self.all,
                 "--memory": self.memory is not None}  # fmt: skip
        for flag, present in given.items():
            if self.families and present:
                raise UsageError(
                    f"`--families` is about no model and goes without `{flag}`",
                    hint="leave one of them out",
                )


    def devices(self, name: str) -> tuple[Device, ...]:
        """Those that memory is counted for. Raises UsageError for what is no size or not there."""
        from llmcli.measure.memory import machine_devices
        from llmcli.records.info import Device

        if self.memory is None:
            return chosen_devices(name, machine_devices())
        found = _SIZE.fullmatch(self.memory)
        free = 0 if found is None else int(float(found[1]) * _UNITS[(found[2] or "G")[0].upper()])
        if not 0 < free < LARGEST:
            raise UsageError(
                f"`--memory {self.memory}` is not a size", hint="give it as in `--memory 80GiB`"
            )
        return (
            Device(
                device="cuda" if name == "auto" else name, name=f"with {self.memory}",
                total_bytes=free, free_bytes=free, bfloat16=True,
            ),
        )  # fmt: skip


def command(info: InfoOptions, model: ModelOptions, output: ViewOutputOptions) -> None:
    """What a model is, and whether it fits the memory of this machine.

    Family, parameters, layers, context, tokenizer, stored formats, bytes: from the configuration
    and the headers of the files alone, so no weights are read and PyTorch
    is not imported. Memory is that of a run with `--dtype` at `--context-length` (default: the
    model's own), against what this machine has free.
    """
    from llmcli.commands.info.view import render_families, render_info

    out = Output("info", output)
    info.check(model)
    if info.families:
        from llmcli.commands.info.measure import supported_families

        families = supported_families()
        out.present(
            lambda: render_families(families), {"families": families}, model=None,
            environment=environment(),
        )  # fmt: skip
        return
    report = _report(info, model, out)
    _check_context(model.context_length, report.model, out)
    out.present(
        lambda: render_info(report, full=info.all, metadata=info.metadata),
        _body(report),
        model=_model_object(report),
        environment=environment(),
        checks=report.checks,
        hint=HINT,
    )
    if report.unsupported is not None:
        raise report.unsupported


def _report(info: InfoOptions, model: ModelOptions, out: Output) -> InfoReport:
    """What the headers of the model say."""
    from llmcli.commands.info.measure import measure_info
    devices = info.devices(model.device)
    with opened_headers(model, out) as (checkpoint, place):
        report = measure_info(
            checkpoint,
            devices,
            dtype=model.dtype,
            quantize=model.quantize,
            activations=model.activations,
            cache=model.cache_type,
            batch=info.batch,
            context=model.context_length,
        )
        if report.model is not None:
            note_quantize(model, checkpoint, out)
            note_tensors(checkpoint, report.surplus, out)
    return replace(report, file=replace(report.file, path=place))


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


def _model_object(report: InfoReport) -> dict[str, Any]:
    """The `model` object of the document, as far as the headers go."""
    from llmcli.records.info import NO_FORMATS

    model = report.model
    about: dict[str, Any] = {
        "name": report.name,
        "path": report.file.path,
        "stored_formats": sorted(stored.format for stored in report.file.formats),
    }
    if model is None:
        return {**about, **NO_FORMATS, "family": None}
    first = model.fits[0]
    return about | {
        "family": model.family,
        "model_type": model.model_type,
        "parameters": model.counts.total,
        "context": model.context,
        **first.need.formats,
        "weight_bytes": first.need.weights,
        "device": first.device.device,
    }


def _body(report: InfoReport) -> dict[str, Any]:
    """Everything that the view shows, as numbers; without any checks they hold."""
    file = vars(report.file) | {
        "metadata": {key: _short(item) for key, item in report.file.metadata.items()}
    }
    return {
        "about": {name: _short(value) for name, value in vars(report.about).items()},
        "file": file,
        "architecture": None if report.model is None else _architecture(report.model),
        "tokenizer": None if report.tokenizer is None else _tokens(vars(report.tokenizer)),
        "flops": None if report.model is None else vars(report.model.flops),
        "memory": [] if report.model is None else _memory(report.model),
        "would_fit": [] if report.model is None else [
            {"options": options, "context": fit.need.context, "needed_bytes": fit.need.total}
            for options, fit in report.model.would_fit
        ],
        "unknown": report.unknown,
        "ignored": report.ignored,
        "checks": {},
        "ok": report.unsupported is None,
    }


def _architecture(model: ModelFacts) -> dict[str, Any]:
    apart = ("fits", "flops", "would_fit")
    fields = {name: value for name, value in vars(model).items() if name not in apart}
    counts, declared = fields.pop("counts"), fields.pop("declared")
    return fields | {
        "declared": None if declared is None else {"dtype": declared[0], "bytes": declared[1]},
        "parameters": counts,
        "layers": [{"count": len(kind.layers)} | vars(kind) for kind in model.layers],
    }


def _memory(model: ModelFacts) -> list[dict[str, Any]]:
    """One object a device: what it has, what a run takes there, and whether that fits."""
    return [
        vars(fit.device)
        | fit.need.formats
        | {
            "dtype": fit.need.formats["activation_format"],
            "batch": fit.need.batch,
            "context": fit.need.context,
            "weights_bytes": fit.need.weights,
            "cache_bytes": fit.need.cache,
            "cache_bytes_per_token": fit.need.cache_per_token,
            "states": fit.need.states,
            "cache_copies_bytes": fit.need.copies,
            "prompt_bytes_estimate": fit.need.activations,
            "runtime_bytes_estimate": fit.need.runtime,
            "needed_bytes": fit.need.total,
            "fits": fit.fits,
            "longest_context": fit.longest,
            "token_bytes": fit.token.bytes,
            "token_weights_bytes": fit.token.weights,
            "token_cache_bytes": fit.token.cache,
            "token_activations_bytes": fit.token.activations,
        }
        for fit in model.fits
    ]


def _tokens(facts: Mapping[str, Any]) -> dict[str, Any]:
    def named(token: tuple[int, str]) -> dict[str, Any]:
        return {"id": token[0], "text": token[1]}

    bos = facts["bos"]
    return dict(facts) | {
        "bos": None if bos is None else named(bos),
        "eos": [named(token) for token in facts["eos"]],
    }


def _short(value: Any) -> Any:
    """A value of metadata for JSON: a long list as its length and its first entries."""
    if not isinstance(value, list):
        return value
    listed = [_short(item) for item in value[:_WHOLE_LIST]]
    return listed if len(value) <= _WHOLE_LIST else {"length": len(value), "first": listed}
