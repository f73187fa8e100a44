"""What every format of a benchmark has: a beginning, rows as they are measured, an end."""

from __future__ import annotations

from typing import Protocol

from llmcli.commands.bench.report.results import BenchRow


class Writer(Protocol):
    """Text for one stream. `header`, then `row` for each, then `footer`, whatever happened."""

    def header(self) -> str:
        """What comes before the first row is measured."""

    def row(self, row: BenchRow) -> str:
        """One row, whole lines of it or what ends in an unfinished one."""

    def footer(self) -> str:
        """What closes it."""
