"""How a benchmark ends: the second table or the document, the notes, and the exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmcli.cli.exits import SIGNALS
from llmcli.cli.output import Output
from llmcli.cli.running import kernels_of
from llmcli.commands.bench.runs import OurOptions
from llmcli.errors import LlmcliError
from llmcli.observe.environment import environment

if TYPE_CHECKING:
    from llmcli.commands.bench.report.fields import Bencher
    from llmcli.commands.bench.report.results import BenchReport
    from llmcli.commands.bench.run import Suppliers


class NothingRan(LlmcliError):
    """No test of a sweep could run: ends as the first of them did. `told`: stdout says so."""

    told = True

    def __init__(self, error: tuple[int, str, str], hint: str | None) -> None:
        super().__init__(error[2], hint=hint)
        self.code, self.kind = error[0], error[1]


def finish(
    report: BenchReport,
    format: str,
    by: Bencher,
    suppliers: Suppliers,
    ours: OurOptions,
    out: Output,
) -> None:
    """The second table or the document, and how the command ends."""
    from llmcli.commands.bench.streams import failures

    if out.json:
        from llmcli.commands.bench.document import bench_document

        models = list(suppliers.models.values())
        body = bench_document(report, by, models)
        header = environment(kernels=kernels_of(*models))
        out.document(body, model=models[0] if models else None, environment=header)
    elif format == "md":
        from llmcli.commands.bench.view.table import render_beside

        weights = f"random weights (seed {ours.seed})" if ours.random_weights else ""
        machine = machine_words(*suppliers.models.values())
        out.show(render_beside(report, machine, weights=weights))
    else:
        from llmcli.commands.bench.view.footer import against_notes

        for words in against_notes(report):
            out.note(words)
    if report.machine_load is not None and report.machine_load.slowed:
        out.note(report.machine_load.words)
    if report.interrupted:
        raise SIGNALS.stopped(told=out.json, where=_after(report))
    errors = [(row.error, row.hint) for row in report.rows if row.error is not None]
    if errors and len(errors) == len(report.rows):
        raise NothingRan(*errors[0])
    if errors:
        out.note(failures(report.rows))


def machine_words(*models: Mapping[str, Any]) -> list[str]:
    """What a result of these models depends on, for a line: `environment_words`."""
    from llmcli.ui.environment import environment_words

    return environment_words(environment(kernels=kernels_of(*models)))


def _after(report: BenchReport) -> str:
    rows = len(report.rows)
    return f" after {rows} test{'s' * (rows != 1)}" if rows else ""
