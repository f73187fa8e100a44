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
    """The footer; empty without phases."""
    if not phases:
        return ()
    missing = {
        phase.name: abs(sum(part.work.flops for part in phase.parts) - workload.flops(phase.name))
        for phase in phases
    }
    unlike = {name: run.unlike for name, run in runs.items()}
    return (
        _adds_up(phases),
        _marks(workload, runs),
        _none("flops", "the parts that were timed have all FLOPs of the forward calls", missing),
        _none(
            "same",
            "instrumented runs compute the logits and tokens of a bare one, bit for bit",
            unlike,
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


def _adds_up(phases: Sequence[PhaseTime]) -> ViewCheck:
    """For the phase whose deviation is largest relative to its tolerance."""
    off = {
        phase.name: (
            abs(sum(part.seconds for part in phase.totals) / phase.seconds - 1),
            max(_APART, _APART_S / phase.seconds),
        )
        for phase in phases
    }
    worst = max(off, key=lambda name: off[name][0] / off[name][1])
    return ViewCheck(
        name="adds_up",
        words="parts and gaps add up to the wall time, which was measured around the run",
        value=off[worst][0],
        tolerance=off[worst][1],
        where=worst if len(off) > 1 else "",
    )


def _marks(workload: Workload, runs: Mapping[Phase, Runs]) -> ViewCheck:
    count, wrong = 0, []
    for phase, run in runs.items():
        names = workload.marks(phase)
        count += len(names)
        wrong += [
            f"{expected or found} ({phase})"
            for expected, found in zip_longest(names, run.median.marks.names)
            if expected != found
        ]
    words = f"the {count} marks are those of the model's activations, in their order"
    return difference("marks", words, wrong)


def _none(name: str, words: str, off: Mapping[Phase, int]) -> ViewCheck:
    """A check that a count is 0 in every phase."""
    worst = max(off, key=lambda phase: off[phase])
    return ViewCheck(
        name=name, words=words, value=float(sum(off.values())), tolerance=0.0,
        where=worst if off[worst] else "",
    )  # fmt: skip
