"""What `llmcli info --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.reports.checks import checks_document
from llmcli.reports.info import NO_FORMATS, About, InfoReport, ModelFacts

_WHOLE_LIST = 16  # entries of metadata that are written in full


def model_object(report: InfoReport) -> dict[str, Any]:
    """The `model` object of the document, as far as headers tell."""
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


def info_document(report: InfoReport) -> dict[str, Any]:
    """Everything that the view shows, as numbers, and each check."""
    file = vars(report.file) | {
        "metadata": {key: _short(item) for key, item in report.file.metadata.items()}
    }
    return {
        "about": _about(report.about),
        "file": file,
        "architecture": None if report.model is None else _architecture(report.model),
        "tokenizer": None if report.tokenizer is None else _tokens(vars(report.tokenizer)),
        "flops": None if report.model is None else vars(report.model.flops),
        "memory": [] if report.model is None else _memory(report.model),
        "unknown": report.unknown,
        "ignored": report.ignored,
        "checks": checks_document(report.checks),
    }


def _about(about: About) -> dict[str, Any]:
    return {name: _short(value) for name, value in vars(about).items()}


def _architecture(model: ModelFacts) -> dict[str, Any]:
    fields = {name: value for name, value in vars(model).items() if name not in ("fits", "flops")}
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
