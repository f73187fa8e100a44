"""A phase as it is reported: the median instrumented run, each part against its lower bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.graph import Place, graph
from llmcli.anatomy.work import added
from llmcli.commands.timing.measure.parts import (
    GAPS,
    Piece,
    in_order,
    over_layers,
    part_times,
    pieces,
    spans,
)
from llmcli.commands.timing.measure.run import Runs
from llmcli.commands.timing.measure.workload import Workload
from llmcli.commands.timing.report import Overhead, PartTime, PhaseName, PhaseTime
from llmcli.measure.ratios import paired
from llmcli.measure.roofline import TimeLowerBound, time_lower_bound
from llmcli.records.ceilings import Ceilings
from llmcli.records.work import PartWork

CALLS, KERNEL = "calls", "kernel"
_NEAR = 0.5  # of a ceiling: from there on it is what the part waits for
_EXPLAINED = 0.5  # of the time beyond the lower bound: so much of it, and it is the starting
_LAUNCHING = 0.9  # of the device's time in which the host was still starting it


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The ceilings for one run in `numbers`, of which a step streams `working_set` bytes.

    `apart`: the device works behind the host, so that the host's time is one of its own.
    """

    ceilings: Ceilings
    numbers: Arithmetic
    working_set: int
    apart: bool

    def bounded(self, part: PartTime) -> PartTime:
        """The same with its bound, where it does counted work in some time."""
        found = time_lower_bound(
            part.work, part.calls, self.ceilings, numbers=self.numbers,
            working_set=self.working_set,
        )  # fmt: skip
        if found.seconds == 0 or part.seconds <= 0:
            return part
        return replace(
            part,
            bound=self._bound(part, found),
            nearest=found.nearest,
            of_bound=found.seconds / part.seconds,
        )

    def _bound(self, part: PartTime, found: TimeLowerBound) -> str:
        """A ceiling only where it is near; the start of operations only where it takes so long."""
        if self.apart and part.host_s >= _LAUNCHING * part.seconds:
            return CALLS
        if found.seconds >= _NEAR * part.seconds:
            return found.nearest
        starting = part.operations * self.ceilings.start_s
        explained = starting >= _EXPLAINED * (part.seconds - found.seconds)
        return CALLS if explained else KERNEL


def phase_time(
    workload: Workload, name: PhaseName, runs: Runs, roof: Roof, *, trace: bool
) -> PhaseTime:
    """The median instrumented run of the phase, part by part; `trace` keeps its spans."""
    works = workload.works(name, runs.experts)
    model = graph(workload.model.config)
    run = list(pieces(runs.median.marks, model))
    order = in_order(model)
    parts = part_times(run, works, operations(pieces(runs.operations, model)), order)
    totals = over_layers(parts, order)
    each = workload.tokens if name == "prefill" else workload.new_tokens
    calls = workload.products(name)
    gemv_s, gemm_s = product_seconds(run, calls)
    return PhaseTime(
        name=name,
        tokens=workload.batch * each,
        past=0 if name == "prefill" else workload.tokens,
        calls=len(calls),
        seconds=runs.median.wall_s,
        bare_s=median_low(runs.bare_s),
        parts=_bounded(parts, roof),
        totals=_bounded(totals, roof),
        gaps_s=sum(part.seconds for part in totals if part.part == GAPS),
        work=added(works),
        overhead=overhead(runs.watched_s, runs.bare_s),
        peak=runs.peak,
        spans=tuple(spans(name, run)) if trace else (),
        gemv_s=gemv_s,
        gemm_s=gemm_s,
    )


def operations(counted: Iterable[Piece]) -> Counter[Place]:
    """How many each (part, layer) starts, of pieces that have them in the place of seconds."""
    found: Counter[Place] = Counter()
    for piece in counted:
        found[piece.place] += round(piece.seconds)
    return found


def product_seconds(
    run: Sequence[Piece], calls: Sequence[Mapping[Place, PartWork]]
) -> tuple[float, float]:
    """Seconds of products of a weight matrix with one row and with more, call by call.

    `calls` has for each forward call the parts with such products.
    """
    gemv_s = gemm_s = 0.0
    for piece in run:
        work = calls[piece.call].get(piece.place) if 0 <= piece.call < len(calls) else None
        if work is None:
            continue
        if work.gemm:
            gemm_s += piece.seconds
        else:
            gemv_s += piece.seconds
    return gemv_s, gemm_s


def overhead(watched_s: Sequence[float], bare_s: Sequence[float]) -> Overhead:
    """The instrumentation overhead, pair by pair."""
    ratios = paired(watched_s, bare_s)
    return Overhead(
        watched_s=tuple(watched_s),
        bare_s=tuple(bare_s),
        ratios=ratios.values,
        median=ratios.median,
        lowest=ratios.lowest,
        highest=ratios.highest,
        quartiles=ratios.quartiles,
    )


def _bounded(parts: Sequence[PartTime], roof: Roof) -> tuple[PartTime, ...]:
    return tuple(roof.bounded(part) for part in parts)
