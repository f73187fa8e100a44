"""Whether the time adds up, nothing is missing, and instrumentation changed no number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmcli.commands.timing.measure.clock import Marks
from llmcli.commands.timing.measure.run import Runs
from llmcli.commands.timing.report import PhaseName, PhaseTime
from llmcli.records.checks import ViewCheck

_APART = 0.02  # of the wall time …
_APART_S = 50e-6  # … or so many seconds of a short run: what begins and ends it is in none
_ESTIMATE = 0.1  # of the estimated bytes …
_SLACK = 16 << 20  # … and what libraries and the allocator keep


def timing_checks(
    phases: Sequence[PhaseTime],
    runs: Mapping[PhaseName, Runs],
    expected: Mapping[PhaseName, Sequence[str]],
    flops: Mapping[PhaseName, int],
) -> tuple[ViewCheck, ...]:
    """The footer. `expected`: the marks of each phase; `flops`: of its calls, by the anatomy.

    Nothing is said of no phases.
    """
    if not phases:
        return ()
    return (
        _adds_up(phases),
        _marks({name: run.median.marks for name, run in runs.items()}, expected),
        _flops(phases, flops),
        _same(runs),
    )


def memory_check(base: int | None, peak: int | None, estimated: int) -> tuple[ViewCheck, ...]:
    """That the model took what `info` says; nothing where it is not known what was held."""
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
    """Of the phase that is nearest to what is allowed, or furthest beyond it."""
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


def _marks(
    marks: Mapping[PhaseName, Marks], expected: Mapping[PhaseName, Sequence[str]]
) -> ViewCheck:
    wrong, where = 0, ""
    for phase, names in expected.items():
        found = marks[phase].names
        places = [i for i, pair in enumerate(zip(names, found, strict=False)) if pair[0] != pair[1]]
        missing = abs(len(names) - len(found))
        if (places or missing) and not where:
            at = places[0] if places else min(len(names), len(found))
            where = f"{names[at] if at < len(names) else found[at]} ({phase})"
        wrong += len(places) + missing
    count = sum(map(len, expected.values()))
    return ViewCheck(
        name="marks",
        words=f"the {count} marks are those of the model's activations, in their order",
        value=float(wrong),
        tolerance=0.0,
        where=where,
    )


def _flops(phases: Sequence[PhaseTime], flops: Mapping[PhaseName, int]) -> ViewCheck:
    off = {
        phase.name: abs(sum(part.work.flops for part in phase.parts) - flops[phase.name])
        for phase in phases
    }
    worst = max(off, key=lambda name: off[name])
    return ViewCheck(
        name="flops",
        words="the parts that were timed have all FLOPs of the forward calls",
        value=float(off[worst]),
        tolerance=0.0,
        where=worst if off[worst] else "",
    )


def _same(runs: Mapping[PhaseName, Runs]) -> ViewCheck:
    unlike = {name: run.unlike for name, run in runs.items()}
    worst = max(unlike, key=lambda name: unlike[name])
    return ViewCheck(
        name="same",
        words="instrumented runs compute the logits and tokens of a bare one, bit for bit",
        value=float(sum(unlike.values())),
        tolerance=0.0,
        where=worst if unlike[worst] else "",
    )
