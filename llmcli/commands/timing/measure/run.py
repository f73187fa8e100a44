"""Runs a phase again and again, with a clock and without, in turns, until the times settle."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from llmcli import devices
from llmcli.anatomy.graph import graph
from llmcli.anatomy.work import Ran
from llmcli.commands.timing.measure.clock import Marks, OperationCount, RunClock, clock_for
from llmcli.commands.timing.report import PhaseName, are_tight
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.graph.routing import Choose
from llmcli.measure.peaks import Peak
from llmcli.measure.quiet import quiet
from llmcli.model import Model
from llmcli.nn.step import Tap
from llmcli.records.progress import Progress

MOST = 128  # runs whose marks are kept: 61 KB each for 16 tokens of a model of 30 layers


@dataclass(frozen=True, kw_only=True)
class InstrumentedRun:
    """A run with a clock: its wall time, measured around it, and its marks."""

    wall_s: float
    marks: Marks


class Kept:
    """Of many instrumented runs the median one, without keeping the marks of all of them.

    Where there are more than `MOST` the one goes whose neighbours are nearest to each other in the
    order of all times: one near the median, whatever it will be, is still there.
    """

    def __init__(self) -> None:
        self._walls: array[float] = array("d")  # of all runs, in order of time
        self._kept: list[InstrumentedRun] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, run: InstrumentedRun) -> None:
        """One more."""
        insort(self._walls, run.wall_s)
        insort(self._kept, run, key=lambda kept: kept.wall_s)
        if len(self._kept) > MOST:
            places = [bisect_left(self._walls, kept.wall_s) for kept in self._kept]
            apart = [after - before for before, after in zip(places, places[2:], strict=False)]
            del self._kept[1 + apart.index(min(apart))]

    @property
    def median(self) -> InstrumentedRun:
        """The one in the middle (the lower one of two), or the nearest to it that was kept."""
        middle = self._walls[(len(self._walls) - 1) // 2]
        return min(self._kept, key=lambda kept: abs(kept.wall_s - middle))


SAMPLE = "sample"  # the mark of a token that is chosen


@dataclass(frozen=True, kw_only=True)
class RunOutput:
    """What a run computed: ids `[B, n]` of the tokens that it chose, and its last logits."""

    ids: tuple[tuple[int, ...], ...]
    logits_BV: Tensor


@dataclass(frozen=True, kw_only=True)
class Runs:
    """All runs of one phase: seconds of each pair, the median instrumented run, what was computed.

    `unlike` counts the numbers (logits and ids) in which an instrumented run differs from the
    first bare one. `peak`: the most bytes held during that first run. `operations`: marks with
    operations in the place of seconds. `experts`: how many of each layer ran, over all calls.
    `interrupted`: there are the pairs that were whole.
    """

    watched_s: tuple[float, ...]
    bare_s: tuple[float, ...]
    median: InstrumentedRun
    out: RunOutput
    unlike: int
    peak: int | None
    operations: Marks
    experts: Ran
    interrupted: bool


class TimedWorkload:
    """`batch` times the same prompt, and `new_tokens` greedy ones after it, end-of-text or not.

    Raises OutOfMemory where the cache does not fit.
    """

    def __init__(self, model: Model, ids: Sequence[int], *, new_tokens: int, batch: int) -> None:
        self.model = model
        self.prompts = [list(ids)] * batch
        self.new_tokens = new_tokens
        capacity = len(ids) + new_tokens
        devices.require_memory(
            model.decoder.state_bytes(batch, capacity),
            model.device,
            f"the cache of {batch} × {capacity} tokens",
            "use a shorter prompt or a smaller --max-tokens",
        )
        self.session = Session(model.decoder, batch, capacity)

    def run(self, phase: PhaseName, clock: RunClock | None, tap: Tap | None = None) -> RunOutput:
        """The phase once, from its beginning: `ready` comes before it, and is no part of it."""
        return self._prefill(clock, tap) if phase == "prefill" else self._decode(clock, tap)

    def ready(self, phase: PhaseName) -> None:
        """The state in which the phase begins: nothing read yet, or the prompt."""
        past = 0 if phase == "prefill" else len(self.prompts[0])
        if self.session.lengths[0] < past:
            self.session.rewind(0)
            self._prefill(None, None)
        if past and self.session.lengths[0] == past:  # the prompt was read just now
            self.session.keep()
        self.session.rewind(past)
        self._sampler = Sampler(
            Sampling(temperature=0.0), self.prompts, samples=1, vocab=self.model.config.vocab,
            device=self.model.device, logprobs=None, limit=max(1, self.new_tokens),
        )  # fmt: skip

    def check_finite(self, out: RunOutput) -> None:
        """Raises NotFinite where logits have a NaN or an infinity, as generating does."""
        self._sampler.pick(out.logits_BV)

    def _prefill(self, clock: RunClock | None, tap: Tap | None) -> RunOutput:
        logits_BV = self.session.prefill(self.prompts, clock=clock, tap=tap)
        return RunOutput(ids=(), logits_BV=logits_BV)

    def _decode(self, clock: RunClock | None, tap: Tap | None) -> RunOutput:
        """Choose, compute, `new_tokens` times, as `generate` does."""
        chosen: list[tuple[int, ...]] = []
        for choices in self.session.decode(
            self._sampler.pick, limit=self.new_tokens, tap=tap, clock=clock
        ):
            if clock is not None:
                clock(SAMPLE)
            chosen.append(tuple(choice.id for choice in choices))
        assert self.session.logits_BV is not None
        return RunOutput(ids=tuple(zip(*chosen, strict=True)), logits_BV=self.session.logits_BV)


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """When a phase has run often enough: after `pairs`, or once its times are tight or its time is
    up, which began at `begin` and is over at `end` (of `perf_counter`).
    """

    pairs: int | None
    begin: float = 0.0
    end: float = math.inf

    def over(self, bare_s: Sequence[float], watched_s: Sequence[float], now: float) -> bool:
        """Whether no further pair is run. A pair that would end too late is not begun."""
        if self.pairs is not None or not bare_s:
            return len(bare_s) == self.pairs
        if now + bare_s[-1] + watched_s[-1] > self.end:
            return True
        if len(bare_s) % (1 + len(bare_s) // 20):  # of many pairs a few more cost little
            return False
        return are_tight(watched_s, bare_s)

    def done(self, pairs: int, now: float) -> tuple[int, int]:
        """(done, total) for a progress bar: of the pairs with the runs to warm up, or of time."""
        if self.pairs is not None:
            return pairs + 1, self.pairs + 1
        share = (now - self.begin) / max(self.end - self.begin, 1e-9)
        return round(1000 * min(1.0, share)), 1000


def run_pairs(
    job: TimedWorkload, phase: PhaseName, until: StoppingRule, *, clock: RunClock | None = None,
    progress: Progress | None = None,
) -> Runs:  # fmt: skip
    """A bare and an instrumented run to warm up, then pairs of both, each first in every other one.

    `clock`: for tests; the device's own without. Raises NotFinite, and KeyboardInterrupt where no
    pair is whole by then.
    """
    clock = clock_for(job.model.device) if clock is None else clock
    words = "timing the prompt" if phase == "prefill" else "timing the new tokens"
    report = progress or (lambda what, done, total: None)
    report(words, 0, until.done(0, perf_counter())[1])
    job.ready(phase)  # what the phase begins with is no part of its memory
    with Peak(job.model.device) as peak:
        first, _ = _bare(job, phase)
    job.check_finite(first)
    unlike = _unlike(first, _instrumented(job, phase, clock)[0])
    with OperationCount() as count:
        operations = _instrumented(job, phase, count)[1].marks
    experts = _experts(job, phase)
    bare_s: list[float] = []
    watched_s: list[float] = []
    kept, interrupted = Kept(), False
    try:
        while not until.over(bare_s, watched_s, perf_counter()):
            report(words, *until.done(len(bare_s), perf_counter()))
            bare, run, off = _pair(job, phase, clock, first, bare_first=len(bare_s) % 2 == 0)
            kept.add(run)
            unlike += off
            bare_s.append(bare)
            watched_s.append(run.wall_s)
    except KeyboardInterrupt:
        if not watched_s:
            raise
        interrupted = True
    return Runs(
        watched_s=tuple(watched_s),
        bare_s=tuple(bare_s[: len(watched_s)]),
        median=kept.median,
        out=first,
        unlike=unlike,
        peak=peak.nbytes,
        operations=operations,
        experts=experts,
        interrupted=interrupted,
    )


def _experts(job: TimedWorkload, phase: PhaseName) -> dict[int, int]:
    """How many experts each mixture ran, over all calls of the phase: in a run of its own."""
    nodes = graph(job.model.config).nodes.values()
    chosen = {node.name: node.layer for node in nodes if isinstance(node.op, Choose)}
    ran: Counter[int] = Counter()

    def tap(name: str, tensor: Tensor) -> None:
        if (layer := chosen.get(name)) is not None:
            ran[layer] += len(set(tensor.flatten().tolist()))

    if chosen:
        job.ready(phase)
        job.run(phase, None, tap)
    return ran


def _pair(
    job: TimedWorkload, phase: PhaseName, clock: RunClock, first: RunOutput, *, bare_first: bool
) -> tuple[float, InstrumentedRun, int]:
    """Seconds of the bare run, the instrumented one, and in how many numbers this one differs."""
    if bare_first:
        bare = _bare(job, phase)[1]
        out, run = _instrumented(job, phase, clock)
    else:
        out, run = _instrumented(job, phase, clock)
        bare = _bare(job, phase)[1]
    return bare, run, _unlike(first, out)


def _bare(job: TimedWorkload, phase: PhaseName) -> tuple[RunOutput, float]:
    job.ready(phase)
    devices.wait_for(job.model.device)
    with quiet():
        begin = perf_counter()
        out = job.run(phase, None)
        devices.wait_for(job.model.device)
        return out, perf_counter() - begin


def _instrumented(
    job: TimedWorkload, phase: PhaseName, clock: RunClock
) -> tuple[RunOutput, InstrumentedRun]:
    job.ready(phase)
    devices.wait_for(job.model.device)
    with quiet():
        begin = perf_counter()
        clock.start()
        out = job.run(phase, clock)
        clock.stop()
        wall_s = perf_counter() - begin
    return out, InstrumentedRun(wall_s=wall_s, marks=clock.marks())


def _unlike(one: RunOutput, other: RunOutput) -> int:
    """How many logits and ids differ, bit for bit."""
    ids = sum(
        a != b
        for left, right in zip(one.ids, other.ids, strict=True)
        for a, b in zip(left, right, strict=True)
    )
    return ids + int((one.logits_BV != other.logits_BV).sum())
