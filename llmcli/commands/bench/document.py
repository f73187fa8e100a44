"""What `llmcli bench --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmcli.commands.bench.report.fields import Bencher
from llmcli.commands.bench.report.results import BenchReport
from llmcli.commands.bench.view.as_json import row_object
from llmcli.reports.ceilings import Ceilings
from llmcli.reports.checks import checks_document


def bench_document(
    report: BenchReport, by: Bencher, models: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Rows with the keys of `-o json` and the time of every token, ratios, ceilings."""
    return {
        "models": models,
        "rows": [
            row_object(row, by) | {"number": row.number, "samples_token_ns": row.token_ns}
            for row in report.rows
        ],
        "against": [
            vars(pair) | {"test": pair.test.name, "undecided": pair.undecided}
            for pair in report.against
        ],
        "ceilings": [_ceilings(ceilings) for ceilings in report.ceilings],
        "machine_load": report.machine_load and report.machine_load.document(),
        "checks": checks_document(report.checks),
        "interrupted": report.interrupted,
        "finish_reason": "interrupted" if report.interrupted else "complete",
    }


def _ceilings(ceilings: Ceilings) -> dict[str, Any]:
    caches = [{"level": level, "bytes": held} for level, held in ceilings.caches]
    return vars(ceilings) | {"caches": caches}
