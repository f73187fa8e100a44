"""Runs a phase again and again: bare, and with a clock, in turns.

Every run of a phase begins in the same state, reads or writes the same tokens and so computes
the same: what differs is only who looks.

Axes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from torch import Tensor

from llmcli import devices
from llmcli.anatomy.graph import graph
from llmcli.anatomy.work import Ran
from llmcli.commands.timing.measure.clock import Marks, RunClock, clock_for
from llmcli.commands.timing.measure.kept import Kept, Watched
from llmcli.commands.timing.measure.operations import OperationCount
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.graph.routing import Choose
from llmcli.model import Model
from llmcli.nn.step import Tap
from llmcli.observe.peaks import Peak
from llmcli.observe.quiet import quiet
from llmcli.reports.progress import Progress

PhaseName = Literal["prefill", "decode"]
SAMPLE = "sample"  # the mark of a token that is chosen


@dataclass(frozen=True, kw_only=True)
class Out:
    """What a run computed: ids `[B, n]` of the tokens that it chose, and its last logits."""

    ids: tuple[tuple[int, ...], ...]
    logits_BV: Tensor


@dataclass(frozen=True, kw_only=True)
class Runs:
    """All runs of one phase: seconds of each pair, the median watched run, and what was computed.

    `unlike` counts the numbers (logits and ids) in which a watched run differs from the first bare
    one. `peak`: the most bytes held during that first run. `operations`: marks with operations in
    the place of seconds. `experts`: how many of each layer ran, over all calls. `interrupted`:
    there are the pairs that were whole.
    """

    watched_s: tuple[float, ...]
    bare_s: tuple[float, ...]
    median: Watched
    out: Out
    unlike: int
    peak: int | None
    operations: Marks
    experts: Ran
    interrupted: bool


class Job:
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

    def run(self, phase: PhaseName, clock: RunClock | None, tap: Tap | None = None) -> Out:
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

    def check_finite(self, out: Out) -> None:
        """Raises NotFinite where logits have a NaN or an infinity, as generating does."""
        self._sampler.pick(out.logits_BV)

    def _prefill(self, clock: RunClock | None, tap: Tap | None) -> Out:
        logits_BV = self.session.prefill(self.prompts, clock=clock, tap=tap)
        return Out(ids=(), logits_BV=logits_BV)

    def _decode(self, clock: RunClock | None, tap: Tap | None) -> Out:
        """Choose, compute, `new_tokens` times, as `generate` does."""
        chosen: list[tuple[int, ...]] = []
        for choices in self.session.decode(
            self._sampler.pick, limit=self.new_tokens, tap=tap, clock=clock
        ):
            if clock is not None:
                clock(SAMPLE)
            chosen.append(tuple(choice.id for choice in choices))
        assert self.session.logits_BV is not None
        return Out(ids=tuple(zip(*chosen, strict=True)), logits_BV=self.session.logits_BV)


def run_pairs(
    job: Job, phase: PhaseName, pairs: int, *, clock: RunClock | None = None,
    progress: Progress | None = None,
) -> Runs:  # fmt: skip
    """A bare and a watched run to warm up, then `pairs` of both, each first in every other pair.

    `clock`: for tests; the device's own without. Raises NotFinite, and KeyboardInterrupt where no
    pair is whole by then.
    """
    clock = clock_for(job.model.device) if clock is None else clock
    words = "timing the prompt" if phase == "prefill" else "timing the new tokens"
    _tell(progress, words, 0, pairs)
    job.ready(phase)  # what the phase begins with is no part of its memory
    with Peak(job.model.device) as peak:
        first, _ = _bare(job, phase)
    job.check_finite(first)
    unlike = _unlike(first, _watched(job, phase, clock)[0])
    with OperationCount() as count:
        operations = _watched(job, phase, count)[1].marks
    experts = _experts(job, phase)
    bare_s: list[float] = []
    watched_s: list[float] = []
    kept, interrupted = Kept(pairs), False
    try:
        for pair in range(pairs):
            _tell(progress, words, pair + 1, pairs)
            bare, run, off = _pair(job, phase, clock, first, bare_first=pair % 2 == 0)
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


def _experts(job: Job, phase: PhaseName) -> dict[int, int]:
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
    job: Job, phase: PhaseName, clock: RunClock, first: Out, *, bare_first: bool
) -> tuple[float, Watched, int]:
    """Seconds of the bare run, the watched one, and in how many numbers this one differs."""
    if bare_first:
        bare = _bare(job, phase)[1]
        out, run = _watched(job, phase, clock)
    else:
        out, run = _watched(job, phase, clock)
        bare = _bare(job, phase)[1]
    return bare, run, _unlike(first, out)


def _tell(progress: Progress | None, words: str, done: int, pairs: int) -> None:
    """The runs to warm up are a pair too."""
    if progress is not None:
        progress(words, done, pairs + 1)


def _bare(job: Job, phase: PhaseName) -> tuple[Out, float]:
    job.ready(phase)
    devices.wait_for(job.model.device)
    with quiet():
        begin = perf_counter()
        out = job.run(phase, None)
        devices.wait_for(job.model.device)
        return out, perf_counter() - begin


def _watched(job: Job, phase: PhaseName, clock: RunClock) -> tuple[Out, Watched]:
    job.ready(phase)
    devices.wait_for(job.model.device)
    with quiet():
        begin = perf_counter()
        clock.start()
        out = job.run(phase, clock)
        clock.stop()
        wall_s = perf_counter() - begin
    return out, Watched(wall_s=wall_s, marks=clock.marks())


def _unlike(one: Out, other: Out) -> int:
    """How many logits and ids differ, bit for bit."""
    ids = sum(
        a != b
        for left, right in zip(one.ids, other.ids, strict=True)
        for a, b in zip(left, right, strict=True)
    )
    return ids + int((one.logits_BV != other.logits_BV).sum())
