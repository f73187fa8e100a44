"""What `llmcli load --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmcli.commands.load.report import LedgerLine, LoadReport
from llmcli.reports.checks import checks_document


def load_document(report: LoadReport, lines: Sequence[LedgerLine]) -> dict[str, Any]:
    """Everything of the view as numbers, and a line of the ledger for each use of a tensor."""
    return {
        "dtype": report.dtype,
        "device": report.device,
        "files": report.files,
        "bytes": {
            "files": report.file_bytes,
            "tensors": report.tensor_bytes,
            "weights": report.weight_bytes,
        },
        "memory": {
            "before": report.base_bytes, "peak": report.peak_bytes, "device": report.device_bytes,
        },
        "stages": [vars(stage) | {"bytes_per_s": stage.bytes_per_s} for stage in report.stages],
        "ledger": [_line(line) for line in lines],
        "shared": report.shared,
        "claims": report.claims,
        "numbers": report.looked_at,
        "notes": report.notes,
        "fault": report.fault or None,
        "not_finite": report.not_finite or None,
        "checks": checks_document(report.checks),
        "ok": report.ok,
    }  # fmt: skip


def _line(line: LedgerLine) -> dict[str, Any]:
    fields = {name: value for name, value in vars(line).items() if name != "tensors"}
    numbers = line.numbers
    told = {"low": "min", "high": "max", "infinite": "inf", "negative": "negative_inf"}
    return fields | {
        "parameter": line.parameter or None,
        "reason": line.reason or None,
        "numbers": None
        if numbers is None
        else {told.get(name, name): value for name, value in vars(numbers).items()},
    }
