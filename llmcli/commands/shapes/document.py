"""What `llmcli shapes --json` prints."""

from __future__ import annotations

from typing import Any

from llmcli.commands.shapes.report import ShapesReport, ShapeTensor, Stored
from llmcli.reports.checks import checks_document


def shapes_document(report: ShapesReport) -> dict[str, Any]:
    """The report as JSON has it: every tensor by itself, and which of them are one row."""
    rows = [{"name": row.name, "layers": row.layers, "formula": row.formula} for row in report.rows]
    return {
        "batch": report.batch,
        "tokens": report.tokens,
        "phases": report.phases,
        "ran": report.ran,
        "prompt": [{"id": id, "text": text} for id, text in report.prompt],
        "letters": report.letters,
        "tensors": [_tensor(tensor) for tensor in report.tensors],
        "rows": rows,
        "layers": report.kinds,
        "cache": report.growth,
        "flops": report.flops,
        "checks": checks_document(report.checks),
    }


def _tensor(tensor: ShapeTensor) -> dict[str, Any]:
    fields = {name: value for name, value in vars(tensor).items() if name != "stored"}
    if tensor.stored is None:
        return fields
    return fields | _stored(tensor.stored)


def _stored(stored: Stored) -> dict[str, Any]:
    return {
        "source": stored.source,
        "stored_shape": stored.shape,
        "stored_format": stored.format,
        "stored_bytes": stored.bytes,
        "operations": stored.operations,
    }


def stored_tensor(stored: Stored) -> dict[str, Any]:
    """A tensor that nothing describes: without letters, formula and place."""
    return {
        "name": stored.source,
        "kind": "parameter",
        "axes": None,
        "shape": stored.shape,
        "dtype": stored.format,
        "bytes": stored.bytes,
        "phase": None,
        "layer": None,
        "formula": None,
        **_stored(stored),
    }
