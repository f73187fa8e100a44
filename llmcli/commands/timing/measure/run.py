"""Runs each phase again and again, with a clock and without, in turns, until the times settle.

Checks that the time adds up, that nothing is missing, and that no number is changed by a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median_low
from time import perf_counter

from torch import Tensor

from llmcli import devices
from llmcli.commands.timing.measure.clock import (
    END,
    SAMPLE,
    STEP,
    Kept,
    OperationCount,
    Roof,
    Run,
    RunClock,
    clock_for,
    in_order,
    over_layers,
    part_times,
    pieces,
    product_seconds,
)
from llmcli.commands.timing.report import Overhead, PhaseTime, Stage, TimingReport
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.graph.cost import (
    cost_by_part,
    decode_calls,
    prompt_calls,
    step_bytes,
    total,
    total_cost,
)
from llmcli.graph.graph import Place, graph
from llmcli.graph.memory import PlannedRun, memory_need
from llmcli.graph.plan import plan
from llmcli.graph.routing import Choose
from llmcli.graph.spec import PHASES, Call, Logits, Phase
from llmcli.measure.machine import CpuContention
from llmcli.measure.peaks import Peak, most
from llmcli.measure.runs import StoppingRule, current, in_turns, timed
from llmcli.model import Model
from llmcli.nn.step import Tap
from llmcli.records.document import ViewCheck, difference
from llmcli.records.machine import Ceilings
from llmcli.records.work import PartWork, Progress, no_progress

LIMIT_S = 10.0  # seconds for all phases together, but one pair of each is always run
_APART = 0.02  # of the wall time …
_APART_S = 50e-6  # … or so many seconds of a short run: what begins and ends it is in none
_ESTIMATE = 0.1  # of the estimated bytes …
_SLACK = 16 << 20  # … and what libraries and the allocator keep


@dataclass(frozen=True, kw_only=True)
class RunOutput:
    """The result of a run: the ids that it chose, and its last logits `[1, V]`."""

    ids: tuple[int, ...]
    logits_BV: Tensor

    def unlike(self, other: RunOutput) -> int:
        """Count the logits and ids that differ in any bit."""
        ids = sum(one != its for one, its in zip(self.ids, other.ids, strict=True))
        return ids + int((self.logits_BV != other.logits_BV).sum())


class Workload:
    """A prompt, and `new_tokens` greedy ones after it, end-of-text or not.

    Raises OutOfMemory where the cache does not fit.
    """

    def __init__(self, model: Model, ids: Sequence[int], new_tokens: int) -> None:
        self.model = model
        self.ids = list(ids)
        self.new_tokens = new_tokens
        self.numbers = model.arithmetic
        capacity = len(ids) + new_tokens
        devices.require_memory(
            model.decoder.state_bytes(1, capacity),
            model.device,
            f"the cache of 1 × {capacity} tokens",
            "use a shorter prompt or a smaller --max-tokens",
        )
        self.session = Session(model.decoder, 1, capacity)

    def ready(self, phase: Phase) -> None:
        """The state in which the phase begins: nothing read yet, or the prompt."""
        past = 0 if phase == "prefill" else len(self.ids)
        if self.session.lengths[0] < past:
            self.session.rewind(0)
            self.session.prefill([self.ids])
        if past and self.session.lengths[0] == past:  # the prompt was read just now
            self.session.keep()
        self.session.rewind(past)
        self._sampler = Sampler(
            Sampling(temperature=0.0),
            [self.ids],
            samples=1,
            vocab=self.model.config.vocab,
            device=self.model.device,
            logprobs=None,
            limit=max(1, self.new_tokens),
        )

    def run(self, phase: Phase, clock: RunClock | None, tap: Tap | None = None) -> RunOutput:
        """The phase once, from its beginning: `ready` comes before it, and is no part of it.

        Decoding chooses and computes, `new_tokens` times, as `generate` does.
        """
        if clock is not None:
            clock.start()
        chosen: list[int] = []
        if phase == "prefill":
            logits_BV = self.session.prefill([self.ids], clock=clock, tap=tap)
        else:
            for (choice,) in self.session.decode(
                self._sampler.pick, limit=self.new_tokens, tap=tap, clock=clock
            ):
                if clock is not None:
                    clock(SAMPLE)
                chosen.append(choice.id)
            logits_BV = self.session.known_logits()
        if clock is not None:
            clock.stop()
        return RunOutput(ids=tuple(chosen), logits_BV=logits_BV)

    def check_finite(self, out: RunOutput) -> None:
        """Raises NotFinite where logits have a NaN or an infinity, as generating does."""
        self._sampler.pick(out.logits_BV)

    def experts(self, phase: Phase) -> dict[int, int]:
        """Run the phase once to count the experts that each layer ran, over all its calls."""
        nodes = graph(self.model.config).nodes.values()
        chosen = {node.name: node.layer for node in nodes if isinstance(node.op, Choose)}
        ran: Counter[int] = Counter()

        def tap(name: str, tensor: Tensor) -> None:
            if (layer := chosen.get(name)) is not None:
                ran[layer] += len(set(tensor.flatten().tolist()))

        if chosen:
            self.ready(phase)
            self.run(phase, None, tap)
        return ran

    def calls(self, phase: Phase) -> Iterator[tuple[Call, Logits]]:
        """The forward calls of a phase."""
        if phase == "decode":
            return decode_calls(batch=1, tokens=self.new_tokens, past=len(self.ids))
        return prompt_calls(batch=1, tokens=len(self.ids))

    def marks(self, phase: Phase) -> tuple[str, ...]:
        """The marks that a run of it makes: of each call first its own, then its activations."""
        config, model = self.model.config, graph(self.model.config)
        call = Call(batch=1, tokens=1, past=0, phase=phase)
        first = (SAMPLE, STEP) if phase == "decode" else (STEP,)
        names = {
            logits: [
                spec.name
                for spec in plan(config, call, logits=logits).written
                if not model[spec.name].shown  # it is computed for a tap only
            ]
            for logits in {logits for _, logits in self.calls(phase)}
        }
        calls = self.calls(phase)
        return (*(mark for _, logits in calls for mark in (*first, *names[logits])), END)

    def products(self, phase: Phase) -> tuple[Mapping[Place, PartWork], ...]:
        """For each of its calls what the parts with a weight matrix take."""
        kinds = [(call.tokens, logits) for call, logits in self.calls(phase)]
        calls = dict(zip(kinds, self.calls(phase), strict=True))  # the cache changes none of them
        found = {}
        for kind, (call, logits) in calls.items():
            works = cost_by_part(self.model.config, ((call, logits),), numbers=self.numbers)
            found[kind] = {
                place: work for place, work in works.items() if work.gemv or work.gemm
            }
        return tuple(found[kind] for kind in kinds)

    @property
    def working_set(self) -> int:
        """Bytes that the last step streams, the weights as they are stored in memory."""
        return step_bytes(self.model.config, len(self.ids) + self.new_tokens, numbers=self.numbers)


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


def run_pairs(workload: Workload, phase: Phase, until: StoppingRule, progress: Progress) -> Runs:
    """A bare and an instrumented run to warm up, then pairs of both, each first in every other one.

    Raises NotFinite, and KeyboardInterrupt where no pair is complete by then.
    """
    device = workload.model.device
    clock = clock_for(device)
    words = "timing the prompt" if phase == "prefill" else "timing the new tokens"

    def once(clock: RunClock | None = None) -> tuple[RunOutput, float]:
        workload.ready(phase)
        return timed(device, lambda: workload.run(phase, clock))

    progress(words, 0, until.done(0, perf_counter())[1])
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
            progress(words, *until.done(len(bare_s), perf_counter()))
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


def phase_time(workload: Workload, name: Phase, runs: Runs, roof: Roof) -> PhaseTime:
    """The median instrumented run of the phase, part by part."""
    config, numbers = workload.model.config, workload.numbers
    works = cost_by_part(config, workload.calls(name), numbers=numbers, ran=runs.experts)
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
        work=total(works),
        overhead=runs.overhead,
        peak=runs.peak,
        gemv_s=gemv_s,
        gemm_s=gemm_s,
        pieces=run,
    )


def measure_timing(
    model: Model,
    ids: Sequence[int],
    new_tokens: int,
    *,
    ceilings: Ceilings,
    phases: Sequence[Phase] = PHASES,
    pairs: int | None = None,
    stages: Sequence[Stage] = (),
    base: int | None = None,
    progress: Progress = no_progress,
) -> TimingReport:
    """Reads the prompt and writes greedy tokens after it, end of text or not, again and again.

    `pairs` of runs, one instrumented and one not; None: until the times are tight. `ceilings`,
    `stages` and `base` are measured by the caller. A KeyboardInterrupt ends the measuring: the
    report has what is complete by then, and says so. Raises OutOfMemory where the cache does not
    fit, NotFinite for logits with a NaN.
    """
    workload = Workload(model, ids, new_tokens)
    roof = Roof(
        ceilings=ceilings,
        numbers=workload.numbers,
        working_set=workload.working_set,
        apart=model.device.type != "cpu",
    )
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
    times = tuple(phase_time(workload, name, runs[name], roof) for name in runs)
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
    run = PlannedRun(
        model.config,
        workload.numbers,
        batch=1,
        context=len(workload.ids) + workload.new_tokens,
        cuda=model.device.type == "cuda",
        native=devices.multiplies_bfloat16(model.device),
    )
    tokenizer = 0 if model.tokenizer is None else model.tokenizer.nbytes
    return memory_need(run, tokenizer=tokenizer).together


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
            total_cost(workload.model.config, call, numbers=workload.numbers, logits=logits)
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
        name=name,
        words=words,
        value=float(sum(off.values())),
        tolerance=0.0,
        where=worst if off[worst] else "",
    )
