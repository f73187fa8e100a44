"""Two engines on the same test, run in turns: how much faster one was, pair by pair."""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.commands.bench.report.results import Against, BenchRow, EngineName
from llmcli.observe.ratios import paired


def against(ours: BenchRow, theirs: BenchRow, order: Sequence[EngineName]) -> Against:
    """Ours ÷ theirs in tokens per second of each pair of runs, which `order` lists as made."""
    ratios = paired(theirs.samples_ns, ours.samples_ns)
    return Against(
        test=ours.test,
        peer=theirs.engine,
        ratios=ratios.values,
        median=ratios.median,
        lowest=ratios.lowest,
        highest=ratios.highest,
        quartiles=ratios.quartiles,
        of_means=ours.avg_ts / theirs.avg_ts,
        order=tuple(order),
        number=ours.number,
    )
