"""Two engines on the same test, run in turns: how much faster one was, pair by pair."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from llmcli.reports.bench import Against, EngineName, Test


def against(
    test: Test,
    peer: EngineName,
    ours_ns: Sequence[int],
    theirs_ns: Sequence[int],
    order: Sequence[EngineName],
    number: int,
) -> Against:
    """Ours ÷ theirs in tokens per second of each pair, their median and their range.

    `order` is that in which the runs were made, `number` that of our row.
    """
    ratios = tuple(theirs / ours for ours, theirs in zip(ours_ns, theirs_ns, strict=True))
    return Against(
        test=test,
        peer=peer,
        ratios=ratios,
        median=median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        order=tuple(order),
        number=number,
    )
