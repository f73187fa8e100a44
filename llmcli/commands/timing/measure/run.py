"""Runs each phase again and again, with a clock and without, in turns, until the times settle.

Checks that the time adds up, that nothing is missing, and that no number is changed by a clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median_low
from time import perf_counter

from llmcli import devices
from llmcli.anatomy.counts import memory_need
from llmcli.anatomy.graph import Place, graph
from llmcli.anatomy.work import added, calls_work, total_work
from llmcli.commands.timing.measure.clock import Marks, OperationCount, RunClock, clock_for
from llmcli.commands.timing.measure.parts import (
    Roof,
    in_order,
    over_layers,
    part_times,
    pieces,
    product_seconds,
)
from llmcli.commands.timing.measure.workload import RunOutput, Workload
from llmcli.commands.timing.report import Overhead, PhaseTime, Stage, TimingReport
from llmcli.graph.spec import PHASES, Phase
from llmcli.measure.machine import CpuContention
from llmcli.measure.peaks import Peak, most
from llmcli.measure.runs import StoppingRule, current, in_turns, timed
from llmcli.model import Model
from llmcli.records.document import ViewCheck, difference
from llmcli.records.machine import Ceilings
from llmcli.records.work import Progress

LIMIT_S = 10.0  # seconds for all phases together, but one pair of each is always run
MOST = 128  # runs whose marks are kept: 61 KB each for 16 tokens of a model of 30 layers
_APART = 0.02  # of the wall time …
_APART_S = 50e-6  # … or so many seconds of a short run: what begins and ends it is in none
_ESTIMATE = 0.1  # of the estimated bytes …
_SLACK = 16 << 20  # … and what libraries and the allocator keep


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: its wall time, measured around it, and the marks of its clock."""

    wall_s: float
    marks: Marks


class Kept:
    """Finds the median of many instrumented runs without keeping the marks of all of them.

    Of more than `MOST` it drops the one whose neighbours are nearest to each other in the order of
    all times, so that one near the final median is always kept.
    """

    def __init__(self) -> None:
        self._walls: array[float] = array("d")  # of all runs, in order of time
        self._kept: list[Run] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, run: Run) -> None:
        """Add a run."""
        insort(self._walls, run.wall_s)
        insort(self._kept, run, key=lambda kept: kept.wall_s)
        if len(self._kept) > MOST:
            places = [bisect_left(self._walls, kept.wall_s) for kept in self._kept]
            apart = [after - before for before, after in zip(places, places[2:], strict=False)]
            del self._kept[1 + apart.index(min(apart))]

    @property
    def median(self) -> Run:
        """The one in the middle (the lower one of two), or the nearest to it that was kept."""
        middle = self._walls[(len(self._walls) - 1) // 2]
        return min(self._kept, key=lambda kept: abs(kept.wall_s - middle))


@dataclass(frozen=True, kw_only=True)
class Runs:
    """All runs of one phase: seconds of each pair, and the median instrumented run.

    `unlike` counts the numbers (logits and ids) in which an instrumented run differs from the
    first bare one. `peak`: the most bytes held during that first run. `operations` of PyTorch by
    place. `experts`: how many of each layer ran, over all calls. `interrupted`: only the pairs
    that were complete are counted.
    """

    overhead: Overhead
    median: Run
    unlike: int
    peak: int | None
    operations: Mapping[Place, int]
    experts: Mapping[int, int]
    interrupted: bool


def run_pairs(
    workload: Workload, phase: Phase, until: StoppingRule, progress: Progress | None = None
) -> Runs:
    """A bare and an instrumented run to warm up, then pairs of both, each first in every other one.

    Raises NotFinite, and KeyboardInterrupt where no pair is complete by then.
    """
    device = workload.model.device
    clock = clock_for(device)
    words = "timing the prompt" if phase == "prefill" else "timing the new tokens"
    report = progress or (lambda what, done, total: None)

    def once(clock: RunClock | None = None) -> tuple[RunOutput, float]:
        workload.ready(phase)
        return timed(device, lambda: workload.run(phase, clock))

    report(words, 0, until.done(0, perf_counter())[1])
    workload.ready(phase)  # what the phase begins with is no part of its memory
    with Peak(device) as peak:
        first, _ = once()
    workload.check_finite(first)
    unlike = first.unlike(once(clock)[0])
    clock.marks()
    operations: Counter[Place] = Counter()
    with OperationCount() as count:
        once(count)
    for piece in pieces(count.marks(), graph(workload.model.config)):
        operations[piece.place] += round(piece.seconds)  # which are numbers of operations here
    experts = workload.experts(phase)
    bare_s: list[float] = []
    watched_s: list[float] = []
    kept, interrupted = Kept(), False
    turns = in_turns(once, lambda: once(clock))
    try:
        while not until.over(watched_s, bare_s, perf_counter()):
            report(words, *until.done(len(bare_s), perf_counter()))
            (_, bare), (out, watched) = next(turns)
            kept.add(Run(wall_s=watched, marks=clock.marks()))
            unlike += first.unlike(out)
            bare_s.append(bare)
            watched_s.append(watched)
    except KeyboardInterrupt:
        if not watched_s:
            raise
        interrupted = True
    return Runs(
        overhead=Overhead.of(watched_s, bare_s[: len(watched_s)]),
        median=kept.median,
        unlike=unlike,
        peak=peak.nbytes,
        operations=operations,
        experts=experts,
        interrupted=interrupted,
    )


def phase_time(
    workload: Workload, name: Phase, runs: Runs, roof: Roof, *, trace: bool
) -> PhaseTime:
    """The median instrumented run of the phase, part by part; `trace` keeps its pieces."""
    config, numbers = workload.model.config, workload.numbers
    works = calls_work(config, workload.calls(name), numbers=numbers, ran=runs.experts)
    model = graph(config)
    run = tuple(pieces(runs.median.marks, model))
    wall_s, order = runs.median.wall_s, in_order(model)
    parts = part_times(run, works, runs.operations, order)
    totals = over_layers(parts, order)
    calls = workload.products(name)
    gemv_s, gemm_s = product_seconds(run, calls)
    return PhaseTime(
        name=name,
        tokens=len(workload.ids) if name == "prefill" else workload.new_tokens,
        past=0 if name == "prefill" else len(workload.ids),
        calls=len(calls),
        seconds=wall_s,
        bare_s=median_low(runs.overhead.bare_s),
        parts=tuple(roof.judged(part, wall_s) for part in parts),
        totals=tuple(roof.judged(part, wall_s) for part in totals),
        work=added(works),
        overhead=runs.overhead,
        peak=runs.peak,
        gemv_s=gemv_s,
        gemm_s=gemm_s,
        pieces=run if trace else (),
    )


def measure_timing(
    model: Model,
    ids: Sequence[int],
    new_tokens: int,
    *,
    ceilings: Ceilings,
    phases: Sequence[Phase] = PHASES,
    pairs: int | None = None,
    trace: bool = False,
    stages: Sequence[Stage] = (),
    base: int | None = None,
    progress: Progress | None = None,
) -> TimingReport:
    """Reads the prompt and writes greedy tokens after it, end of text or not, again and again.

    `pairs` of runs, one instrumented and one not; None: until the times are tight. `ceilings`,
    `stages` and `base` are measured by the caller. `trace` keeps the pieces of a run. A
    KeyboardInterrupt ends the measuring: the report has what is complete by then, and says so.
    Raises OutOfMemory where the cache does not fit, NotFinite for logits with a NaN.
    """
    workload = Workload(model, ids, new_tokens)
    roof = Roof(
        ceilings=ceilings, numbers=workload.numbers, working_set=workload.working_set,
        apart=model.device.type != "cpu",
    )  # fmt: skip
    runs: dict[Phase, Runs] = {}
    busy, begin = CpuContention(), perf_counter()
    interrupted = False
    try:
        with current(model.device):
            for number, name in enumerate(phases, 1):
                # what one phase leaves of its time is the next one's
                end = begin + LIMIT_S * number / len(phases)
                until = StoppingRule(pairs=pairs, begin=perf_counter(), end=end)
                runs[name] = run_pairs(workload, name, until, progress)
                if interrupted := runs[name].interrupted:
                    break
    except KeyboardInterrupt:
        interrupted = True
    load = busy.load(ceilings.threads if model.device.type == "cpu" else 1)
    times = tuple(phase_time(workload, name, runs[name], roof, trace=trace) for name in runs)
    peak = most(*(stage.peak for stage in stages), *(phase.peak for phase in times))
    estimated = _estimated(workload)
    checks = timing_checks(workload, times, runs)
    if "prefill" in runs:  # what reading the prompt takes is in the estimate
        checks += memory_check(base, peak, estimated)
    return TimingReport(
        prompt_tokens=len(ids),
        dtype=workload.numbers.dtype,
        stages=tuple(stages),
        phases=times,
        ceilings=ceilings,
        base=base,
        peak=peak,
        estimated=estimated,
        weight_bytes=model.weight_bytes,
        working_set=workload.working_set,
        machine_load=load,
        checks=checks,
        interrupted=interrupted,
    )


def _estimated(workload: Workload) -> int:
    """Bytes that `info` says of such a run."""
    model = workload.model
    need = memory_need(
        model.config, workload.numbers, batch=1, context=len(workload.ids) + workload.new_tokens,
        cuda=model.device.type == "cuda",
        native=devices.multiplies_bfloat16(model.device),
        tokenizer=0 if model.tokenizer is None else model.tokenizer.nbytes,
    )  # fmt: skip
    return need.together


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
        calls = (
            total_work(workload.model.config, call, numbers=workload.numbers, logits=logits)
            for call, logits in workload.calls(name)
        )
        missing[name] = abs(timed - sum(work.flops for work in calls))
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
