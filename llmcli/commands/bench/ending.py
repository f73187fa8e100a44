"""How a benchmark ends: the second table or the document, the notes, and the exit code."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llmcli
from llmcli.commands.bench.report.fields import BuildInfo
from llmcli.commands.bench.report.results import BenchReport, BenchRequest
from llmcli.commands.bench.view.formats import row_object
from llmcli.errors import LlmcliError
from llmcli.measure.environment import environment
from llmcli.records.ceilings import Ceilings
from llmcli.records.checks import checks_document
from llmcli.records.numbers import counted
from llmcli.shell.exits import SIGNALS
from llmcli.shell.output import Output
from llmcli.shell.running import kernels_of

_SECONDS = 5


def build_info() -> BuildInfo:
    """The program and the machine; a number of 0 stands for an installed version.

    llama-bench's number counts the commits, and so does ours where there are any to count.
    """
    machine = environment()
    root = Path(llmcli.__file__).resolve().parents[1]
    commit, number = llmcli.__version__, 0
    if (root / ".git").exists():  # not that of a project which has us in its own environment
        said = _git(root, "rev-parse", "--short=8", "HEAD")
        count = _git(root, "rev-list", "--count", "HEAD")
        if said and count.isdecimal():
            commit, number = said, int(count)
    return BuildInfo(
        build_commit=commit,
        build_number=number,
        cpu_info=machine.processor,
        gpu_info=", ".join(machine.gpus),
    )


@cache
def _git(root: Path, *words: str) -> str:
    """What git says, nothing where it is not installed or refuses."""
    try:
        said = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()


def bench_document(
    report: BenchReport, by: BuildInfo, models: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Rows with the keys of `-o json` and the time of every token, ratios, ceilings."""
    return {
        "models": models,
        "rows": [
            row_object(row, by) | {"number": row.number, "samples_token_ns": row.token_ns}
            for row in report.rows
        ],
        "against": [
            vars(pair)
            | {"test": pair.test.name, "interval": pair.interval, "undecided": pair.undecided}
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


class NothingRan(LlmcliError):
    """No test of a sweep could run: ends as the first of them did. `told`: stdout says so."""

    told = True

    def __init__(self, error: tuple[int, str, str], hint: str | None) -> None:
        super().__init__(error[2], hint=hint)
        self.code, self.kind = error[0], error[1]


def finish(
    report: BenchReport,
    format: str | None,
    by: BuildInfo,
    request: BenchRequest,
    models: Sequence[Mapping[str, Any]],
    out: Output,
) -> None:
    """The second table or the document, and how the command ends."""
    from llmcli.commands.bench.view.table import against_notes, render_beside

    if out.json:
        header = environment(kernels=kernels_of(*models))
        body = bench_document(report, by, models)
        out.document(body, model=models[0] if models else None, environment=header)
    elif format in (None, "md"):
        weights = f"random weights (seed {request.seed})" if request.random_weights else ""
        out.show(render_beside(report, machine_words(*models), weights=weights))
    else:
        for words in against_notes(report):
            out.note(words)
    if report.machine_load is not None and report.machine_load.slowed:
        out.note(report.machine_load.words)
    if report.interrupted:
        after = f" after {counted(len(report.rows), 'test')}" if report.rows else ""
        raise SIGNALS.stopped(told=out.json, where=after)
    errors = [(row.error, row.hint) for row in report.rows if row.error is not None]
    if errors and len(errors) == len(report.rows):
        raise NothingRan(*errors[0])
    if errors:
        out.note(f"{len(errors)} of {len(report.rows)} tests could not run")


def machine_words(*models: Mapping[str, Any]) -> list[str]:
    """What a result of these models depends on, for a line: `environment_words`."""
    from llmcli.ui.environment import environment_words

    return environment_words(environment(kernels=kernels_of(*models)))
