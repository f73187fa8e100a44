"""Whether the time adds up, nothing is missing, and instrumentation changed no number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from llmcli.commands.timing.measure.workload import Workload
from llmcli.commands.timing.report import PhaseTime
from llmcli.graph.spec import Phase
from llmcli.records.checks import ViewCheck, difference

if TYPE_CHECKING:
    from llmcli.commands.timing.measure.run import Runs

_APART = 0.02  # of the wall time …
_APART_S = 50e-6  # … or so many seconds of a short run: what begins and ends it is in none
_ESTIMATE = 0.1  # of the estimated bytes …
_SLACK = 16 << 20  # … and what libraries and the allocator keep


def timing_checks(
    workload: Workload, phases: Sequence[PhaseTime], runs: Mapping[Phase, Runs]
) -> tuple[ViewCheck, ...]:
    """The footer; empty without phases. A check's `where` is the phase that is furthest off."""
    if not phases:
        return ()
    off, missing, wrong, count = {}, {}, [], 0
    for phase in phases:
        name = phase.name
        apart = abs(sum(part.seconds for part in phase.totals) / phase.seconds - 1)
        off[name] = apart, max(_APART, _APART_S / phase.seconds)
        timed = sum(part.work.flops for part in phase.parts)
        missing[name] = abs(timed - workload.flops(name))
        marks = workload.marks(name)
        count += len(marks)
        wrong += [
            f"{expected or found} ({name})"
            for expected, found in zip_longest(marks, runs[name].median.marks.names)
            if expected != found
        ]
    in_order = f"the {count} marks are those of the model's activations, in their order"
    worst = max(off, key=lambda name: off[name][0] / off[name][1])
    return (
        ViewCheck(
            name="adds_up",
            words="parts and gaps add up to the wall time, which was measured around the run",
            value=off[worst][0],
            tolerance=off[worst][1],
            where=worst if len(off) > 1 else "",
        ),
        difference("marks", in_order, wrong),
        _none("flops", "the parts that were timed have all FLOPs of the forward calls", missing),
        _none(
            "same",
            "instrumented runs compute the logits and tokens of a bare one, bit for bit",
            {name: run.unlike for name, run in runs.items()},
        ),
    )


def memory_check(base: int | None, peak: int | None, estimated: int) -> tuple[ViewCheck, ...]:
    """Compare the memory taken with `info`'s estimate; empty where `base` or `peak` is unknown."""
    if base is None or peak is None:
        return ()
    return (
        ViewCheck(
            name="memory",
            words="the model took the memory that info estimates, up to 10 % and 16 MiB",
            value=abs(peak - base - estimated) / estimated,
            tolerance=_ESTIMATE + _SLACK / estimated,
        ),
    )


def _none(name: str, words: str, off: Mapping[Phase, int]) -> ViewCheck:
    """A check that a count is 0 in every phase."""
    worst = max(off, key=lambda phase: off[phase])
    return ViewCheck(
        name=name, words=words, value=float(sum(off.values())), tolerance=0.0,
        where=worst if off[worst] else "",
    )  # fmt: skip
