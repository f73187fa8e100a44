"""What `llmcli timing --json` prints."""

from __future__ import annotations

from typing import Any

from llmcli.commands.timing.report import PartTime, PhaseTime, TimingReport
from llmcli.reports.checks import checks_document
from llmcli.reports.work import PartWork


def timing_document(report: TimingReport) -> dict[str, Any]:
    """Everything that the view shows, and every part of every layer; the trace is a file."""
    apart = ("checks", "interrupted")
    fields = {name: value for name, value in vars(report).items() if name not in apart}
    return fields | {
        "finish_reason": "interrupted" if report.interrupted else "complete",
        "phases": [_phase(phase) for phase in report.phases],
        "working_set_in": report.ceilings.read(report.working_set).level,
        "splits": [
            vars(split) | {"pieces": [{"name": name, "seconds": s} for name, s in split.pieces]}
            for split in report.splits
        ],
        "machine_load": report.machine_load and report.machine_load.document(),
        "ceilings": vars(report.ceilings)
        | {"caches": [{"level": name, "bytes": held} for name, held in report.ceilings.caches]},
        "checks": checks_document(report.checks),
        "ok": all(check.ok for check in report.checks),
    }


def _phase(phase: PhaseTime) -> dict[str, Any]:
    fields = {name: value for name, value in vars(phase).items() if name != "spans"}
    return fields | {
        "tokens_per_s": phase.tokens / phase.bare_s if phase.bare_s > 0 else None,
        "work": _work(phase.work),
        "parts": [_part(part, phase) for part in phase.parts],
        "totals": [_part(part, phase) for part in phase.totals],
    }


def _part(part: PartTime, phase: PhaseTime) -> dict[str, Any]:
    """Rates are null where there is no such work, or no time."""

    def per_second(amount: int) -> float | None:
        return amount / part.seconds if amount and part.seconds > 0 else None

    return vars(part) | {
        "share": part.seconds / phase.seconds if phase.seconds > 0 else None,
        "work": _work(part.work),
        "bytes_per_s": per_second(part.work.bytes),
        "flops_per_s": per_second(part.work.flops),
    }


def _work(work: PartWork) -> dict[str, int]:
    return vars(work) | {"bytes": work.bytes}
