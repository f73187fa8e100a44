"""Runs each phase again and again, with a clock and without, in turns, until the times settle.

Checks that the time adds up, that nothing is missing, and that no number is changed by a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    RunClock,
    clock_for,
    in_order,
    judged,
    over_layers,
    part_times,
    pieces,
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
from llmcli.graph.memory import memory_need
from llmcli.graph.plan import plan
from llmcli.graph.routing import Choose
from llmcli.graph.spec import PHASES, Call, Logits, Phase
from llmcli.measure.ceilings import Roofline
from llmcli.measure.engines import planned_run
from llmcli.measure.machine import CpuContention
from llmcli.measure.peaks import Peak, most
from llmcli.measure.runs import StoppingRule, current, in_turns, timed
from llmcli.model import Model
from llmcli.nn.step import Tap
from llmcli.records.document import ViewCheck, difference, zero_counts
from llmcli.records.machine import Ceilings
from llmcli.records.work import Cost, Progress, no_progress

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
        self.precision = model.precision
        self.capacity = len(ids) + new_tokens
        devices.require_memory(
            model.decoder.state_bytes(1, self.capacity),
            model.device,
            f"the cache of 1 × {self.capacity} tokens",
            "use a shorter prompt or a smaller --max-tokens",
        )
        self.session = Session(model.decoder, 1, self.capacity)
        self.session.state.stepped = True  # the run that warms up records its first step, too

    def ready(self, phase: Phase) -> None:
        """The state in which the phase begins: nothing read yet, or the prompt."""
        session, past = self.session, len(self.ids)
        if phase == "prefill":
            session.rewind(0)
        else:
            if session.lengths[0] == past:  # the prompt was read just now
                session.keep()
            if session.reuse(self.ids) < past:  # or rotations changed, so that it is not kept
                session.rewind(0)
                session.prefill([self.ids])
                session.keep()
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

        Decoding chooses and computes, `new_tokens` times, as `generate` does: on a CUDA device it
        waits for a token only after the next step was started, unless a clock or a tap looks on.
        """
        if clock is not None:
            clock.start()
        chosen: list[int] = []
        if phase == "prefill":
            logits_BV = self.session.prefill([self.ids], clock=clock, tap=tap)
        else:
            queued = self.model.device.type == "cuda" and clock is None and tap is None
            choose = self._sampler.draw if queued else self._sampler.pick
            for (choice,) in self.session.decode(
                choose, limit=self.new_tokens, tap=tap, clock=clock
            ):
                if clock is not None:
                    clock(SAMPLE)
                chosen.append(choice.id)
            logits_BV = self.session.known_logits()
        if clock is not None:
            clock.stop()
        return RunOutput(ids=tuple(chosen), logits_BV=logits_BV)

    @property
    def captured(self) -> bool:
        """Whether steps without a clock were captured, in which parts cannot be timed."""
        state = self.session.state
        return state.lengths_B is not None and bool(state.recorded)

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
        return prompt_calls(batch=1, tokens=len(self.ids), chunk=self.session.chunk)

    def marks(self, phase: Phase) -> tuple[str, ...]:
        """The marks that a run of it makes: of each call first its own, then its activations."""
        config, model = self.model.config, graph(self.model.config)
        call = Call(batch=1, tokens=1, past=0, phase=phase)
        first = (SAMPLE, STEP) if phase == "decode" else (STEP,)
        names = {
            logits: [
                spec.name
                for spec in plan(config, call, logits=logits).written
                if not model[spec.name].tap_only  # it is computed for a tap only
            ]
            for logits in {logits for _, logits in self.calls(phase)}
        }
        calls = self.calls(phase)
        return (*(mark for _, logits in calls for mark in (*first, *names[logits])), END)

    def products(self, phase: Phase) -> Iterator[Mapping[Place, Cost]]:
        """For each of its calls what the parts with a weight matrix take."""
        found: dict[tuple[int, Logits], Mapping[Place, Cost]] = {}
        for call, logits in self.calls(phase):
            kind = call.tokens, logits  # the cache changes none of them
            if kind not in found:
                works = cost_by_part(self.model.config, ((call, logits),), precision=self.precision)
                found[kind] = {at: work for at, work in works.items() if work.gemv or work.gemm}
            yield found[kind]

    @property
    def working_set(self) -> int:
        """Bytes that the last step streams, the weights as they are stored in memory."""
        return step_bytes(self.model.config, self.capacity, precision=self.precision)

    @property
    def estimated(self) -> int:
        """Bytes that `info` says of such a run."""
        model = self.model
        run = planned_run(model.config, self.precision, model.device, context=self.capacity)
        tokenizer = 0 if model.tokenizer is None else model.tokenizer.nbytes
        return memory_need(run, tokenizer=tokenizer).together


def time_phase(
    workload: Workload, name: Phase, until: StoppingRule, roof: Roofline, progress: Progress
) -> tuple[Callable[[], PhaseTime], bool]:
    """A bare and an instrumented run to warm up, then pairs of both, each first in every other one.

    Returns what computes of these the median instrumented run, part by part, and whether they were
    interrupted. Where bare runs replay captured steps, the instrumented one is scaled to their time
    (on a CUDA device between two events). Raises NotFinite, and KeyboardInterrupt where no pair is
    complete by then.
    """
    device, config = workload.model.device, workload.model.config
    clock, model = clock_for(device), graph(config)
    words = "timing the prompt" if name == "prefill" else "timing the new tokens"
    ends = clock_for(device)

    def between_events() -> RunOutput:
        ends.start()
        out = workload.run(name, None)
        ends.stop()
        return out

    def once(clock: RunClock | None = None) -> tuple[RunOutput, float]:
        workload.ready(name)
        if clock is not None or name == "prefill" or device.type != "cuda":
            return timed(device, lambda: workload.run(name, clock))
        out, _ = timed(device, between_events)
        return out, sum(ends.marks().seconds)

    progress(words, 0, until.done(0, perf_counter())[1])
    workload.ready(name)  # what the phase begins with is no part of its memory
    with Peak(device) as peak:
        first, _ = once()
    workload.check_finite(first)
    unlike = first.unlike(once(clock)[0])
    clock.marks()
    operations: Counter[Place] = Counter()
    with OperationCount() as count:
        once(count)
    for piece in pieces(count.marks(), model):
        operations[piece.place] += round(piece.seconds)  # which are numbers of operations here
    experts = workload.experts(name)
    bare_s: list[float] = []
    watched_s: list[float] = []
    kept, interrupted = Kept(), False
    turns = in_turns(once, lambda: once(clock))
    try:
        while not until.over(watched_s, bare_s, perf_counter()):
            progress(words, *until.done(len(bare_s), perf_counter()))
            (_, bare), (out, watched) = next(turns)
            kept.add(clock.marks(watched))
            unlike += first.unlike(out)
            bare_s.append(bare)
            watched_s.append(watched)
    except KeyboardInterrupt:
        if not watched_s:
            raise
        interrupted = True
    del bare_s[len(watched_s) :]
    captured = name == "decode" and workload.captured

    placed = workload.model.decoder.placed
    over_all = roof if {*placed} == {device} else None

    def limit(layer: int | None) -> Roofline | None:
        return roof if layer is None or placed[layer] == device else None

    def phase() -> PhaseTime:
        marks, order = kept.median, in_order(model)
        factor = median_low(bare_s) / marks.wall_s if captured else None
        if factor is not None:
            marks = marks.scaled(factor)
        calls, precision = workload.calls(name), workload.precision
        works = cost_by_part(config, calls, precision=precision, ran=experts)
        run, products = tuple(pieces(marks, model)), [*workload.products(name)]
        parts = part_times(run, works, operations, order)
        totals = over_layers(parts, order)
        by_rows = {False: 0.0, True: 0.0}  # seconds of products with one row, and with more
        for piece in run:
            if 0 <= piece.call < len(products) and (work := products[piece.call].get(piece.place)):
                by_rows[work.gemm > 0] += piece.seconds
        return PhaseTime(
            name=name,
            tokens=len(workload.ids) if name == "prefill" else workload.new_tokens,
            past=0 if name == "prefill" else len(workload.ids),
            calls=len(products),
            seconds=marks.wall_s,
            bare_s=median_low(bare_s),
            parts=tuple(judged(part, marks.wall_s, limit(part.layer), captured) for part in parts),
            totals=tuple(judged(part, marks.wall_s, over_all, captured) for part in totals),
            work=total(works),
            overhead=Overhead.of(watched_s, bare_s),
            parts_scaled_by=factor,
            peak=peak.nbytes,
            gemv_s=by_rows[False],
            gemm_s=by_rows[True],
            pieces=run,
            marks=marks.names,
            unlike=unlike,
            interrupted=interrupted,
        )

    return phase, interrupted


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
    precision, working_set = workload.precision, workload.working_set
    roof = Roofline(ceilings=ceilings, precision=precision, working_set=working_set)
    found: list[Callable[[], PhaseTime]] = []
    busy, begin = CpuContention(), perf_counter()
    interrupted = False
    try:
        with current(model.device):
            for number, name in enumerate(phases, 1):
                # what one phase leaves of its time is the next one's
                end = begin + LIMIT_S * number / len(phases)
                until = StoppingRule(pairs=pairs, begin=perf_counter(), end=end)
                phase, interrupted = time_phase(workload, name, until, roof, progress)
                found.append(phase)
                if interrupted:
                    break
    except KeyboardInterrupt:
        interrupted = True
    load = busy.load(ceilings.threads if model.device.type == "cpu" else 1)

    def report(interrupted: bool) -> TimingReport:
        times = [phase() for phase in found]
        peak = most(*(stage.peak for stage in stages), *(phase.peak for phase in times))
        checks, estimated = timing_checks(workload, times), workload.estimated
        if times and times[0].name == "prefill":  # what reading the prompt takes is in the estimate
            checks += memory_check(base, peak, estimated)
        return TimingReport(
            prompt_tokens=len(ids),
            dtype=precision.dtype,
            stages=tuple(stages),
            phases=tuple(times),
            ceilings=ceilings,
            base=base,
            peak=peak,
            estimated=estimated,
            weight_bytes=model.weight_bytes,
            working_set=working_set,
            machine_load=load,
            checks=checks,
            interrupted=interrupted,
            several_devices=len(model.decoder.devices) > 1,
        )

    try:
        return report(interrupted)
    except KeyboardInterrupt:  # again: nothing that was measured is lost
        return report(True)


def timing_checks(workload: Workload, phases: Sequence[PhaseTime]) -> tuple[ViewCheck, ...]:
    """The footer; empty without phases. A check's `where` is the phase that is furthest off."""
    if not phases:
        return ()
    off, missing, wrong, count = [], dict[str, int](), [], 0
    for phase in phases:
        name = phase.name
        off.append(
            ViewCheck(
                name="adds_up",
                words="parts and gaps add up to the wall time, which was measured around the run",
                value=abs(sum(part.seconds for part in phase.totals) / phase.seconds - 1),
                tolerance=max(_APART, _APART_S / phase.seconds),
                where=name if len(phases) > 1 else "",
            )
        )
        timed = sum(part.work.flops for part in phase.parts)
        calls = (
            total_cost(workload.model.config, call, precision=workload.precision, logits=logits)
            for call, logits in workload.calls(name)
        )
        missing[name] = abs(timed - sum(work.flops for work in calls))
        marks = workload.marks(name)
        count += len(marks)
        wrong += [
            f"{expected or found} ({name})"
            for expected, found in zip_longest(marks, phase.marks)
            if expected != found
        ]
    flops = "the parts that were timed have all FLOPs of the forward calls"
    in_order = f"the {count} marks are those of the model's activations, in their order"
    return (
        max(off, key=lambda check: check.value / check.tolerance),
        difference("marks", in_order, wrong),
        zero_counts("flops", flops, missing),
        zero_counts(
            "same",
            "instrumented runs compute the logits and tokens of a bare one, bit for bit",
            {phase.name: phase.unlike for phase in phases},
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
