"""Runs the ladder: every rung reads the same tokens, is compared with the one below and timed.

Letters: b sequences, n tokens of the prompt, g tokens read one by one after it, V vocabulary,
d width.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.count import count, loop_work
from llmcli.commands.ladder.measure.estimate import Run, estimate
from llmcli.commands.ladder.measure.record import Recorder
from llmcli.commands.ladder.measure.rungs.batch import Batch
from llmcli.commands.ladder.measure.rungs.cache import KeyValueCache
from llmcli.commands.ladder.measure.rungs.combined import CombinedQKV
from llmcli.commands.ladder.measure.rungs.fused import FusedKernels
from llmcli.commands.ladder.measure.rungs.heads import HeadsAsDimension
from llmcli.commands.ladder.measure.rungs.loops import Loops
from llmcli.commands.ladder.measure.rungs.matrices import Matrices
from llmcli.commands.ladder.measure.rungs.rows import VectorRows
from llmcli.commands.ladder.measure.walk import Rung
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.commands.ladder.measure.words import RUNGS as WORDS
from llmcli.commands.ladder.measure.words import wording
from llmcli.commands.ladder.measure.workload import Workload
from llmcli.commands.ladder.report import RungReport, Spread, Work
from llmcli.records.progress import Progress

# all of them, from the lowest up
RUNGS: tuple[type[Rung], ...] = (
    *(Loops, VectorRows, Matrices, HeadsAsDimension),
    *(CombinedQKV, KeyValueCache, Batch, FusedKernels),
)

# What rounding may change, relative to the largest number compared: logits are of the order of 10
# in most models and of hundreds in some, the rows after a block go up to thousands. Below 10 the
# logits are held to 1e-4 and 1e-9.
ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-10}
LEAST = 10.0
BLOCK = 64  # rows of logits that are compared at a time, in float64
MOST_ROUNDS, ROUNDS_S = 10, 2.0  # small models are timed more often, while it takes no longer
ONCE_S = 2.0  # a rung that takes longer for its first pass is not run again


class LadderInterrupted(KeyboardInterrupt):
    """Ctrl-C while the ladder runs. `rungs`: the reports of those that were reached."""

    def __init__(self, rungs: tuple[RungReport, ...]) -> None:
        super().__init__()
        self.rungs = rungs


@torch.inference_mode()
def run_ladder(
    weights: Weights,
    workload: Workload,
    *,
    numbers: Sequence[int] = (),
    progress: Progress | None = None,
    record: bool = False,
) -> tuple[RungReport, ...]:
    """Runs the rungs `numbers` (default: all) from the lowest up and reports each.

    With `record` the lines that ran are in the reports, too. A rung's difference is taken over the
    logits of every prompt token and of every token read after it; where one of the two was too slow
    to run whole, over the rows after block 0. Raises LadderInterrupted where Ctrl-C ends it.
    """
    runs: list[Run] = []
    try:
        _first_pass(weights, workload, numbers, runs, progress, record)
        _time_in_turns(runs, workload, progress)
    except KeyboardInterrupt as stop:
        raise LadderInterrupted(_reports(runs, workload)) from stop
    return _reports(runs, workload)


def _first_pass(
    weights: Weights, workload: Workload, numbers: Sequence[int], runs: list[Run],
    progress: Progress | None, record: bool,
) -> None:  # fmt: skip
    """The first pass of every rung, each compared with the one below; fills `runs`."""
    kinds = [kind for kind in RUNGS if not numbers or kind.number in numbers]
    for index, kind in enumerate(kinds):
        if progress is not None:
            progress(f"rung {kind.number}: {kind.name}", index, len(kinds))
        # the rung below a batch reads every sequence of it too, one after the other
        batched = any(near.batched for near in kinds[index : index + 2])
        recorder = Recorder(None if kind.extend is Rung.extend else kind.extend, on=record)
        done = _run(kind, weights, workload, len(workload.prompts) if batched else 1, recorder)
        done.listings = recorder.listings
        done.work = done.work or _work(done.rung, workload)
        if runs:
            done.compared = _compare(runs[-1], done, workload)
            runs[-1].out = torch.empty(0)  # the logits of a long prompt are large
        runs.append(done)


def _run(
    kind: type[Rung], weights: Weights, workload: Workload, rows: int, recorder: Recorder
) -> Run:
    """The first pass, or what one block lets expect."""
    with recorder:
        rung = kind(weights)
    done = estimate(rung, workload, rows, recorder)
    if done is None:
        rung.prepare()
        done = Run(rung=rung)
        rung.tap = recorder.tap if recorder.on else None
        with recorder:
            done.out = done.read(workload.prompts[:rows], workload.more)
        rung.tap = None
    return done


def _compare(below: Run, above: Run, workload: Workload) -> tuple[str, float, float]:
    """What was compared, the largest difference, and what rounding may explain."""
    dtype = above.rung.weights.decoder.dtype
    if below.part is None and above.part is None:
        rows = min(len(below.out), len(above.out))
        one, other = below.out[:rows].flatten(0, 1), above.out[:rows].flatten(0, 1)
        largest = max(LEAST, other.abs().max().item())
        return "logits", _difference(one, other), ALLOWED[dtype] * largest
    tokens = min(done.part for done in (below, above) if done.part is not None)
    one, other = (_rows(done, workload, tokens) for done in (below, above))
    words = f"rows of {tokens} of {workload.prompts.shape[1]} tokens after block 0"
    return words, _difference(one, other), ALLOWED[dtype] * other.abs().max().item()


def _rows(done: Run, workload: Workload, tokens: int) -> Tensor:
    """The rows `[tokens, d]` after block 0: a causal model's first rows need no later token."""
    if done.part is not None:
        return done.out[:tokens]
    ids = workload.prompts[:1, :tokens] if done.rung.batched else workload.prompts[0, :tokens]
    return done.rung.forward(ids, 0).reshape(tokens, -1)


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest, NaN if any is; in blocks of rows, on the CPU, where the loops' numbers are."""
    differences = [
        (one[at : at + BLOCK].cpu().double() - other[at : at + BLOCK].cpu().double()).abs().max()
        for at in range(0, len(one), BLOCK)
    ]
    return torch.stack(differences).max().item()


def _time_in_turns(runs: Sequence[Run], workload: Workload, progress: Progress | None) -> None:
    """Times the rungs that are fast in turns, so that a noisy moment hits all of them alike."""
    fast = [c for c in runs if c.part is None and sum(c.prompt_s + c.token_s) <= ONCE_S]
    begin, done_rounds = perf_counter(), 0
    while done_rounds < workload.rounds or (
        0 < done_rounds < MOST_ROUNDS * workload.rounds and perf_counter() - begin < ROUNDS_S
    ):
        if progress is not None:
            progress("timing in turns", min(done_rounds, workload.rounds), workload.rounds)
        for done in fast:
            first = len(done.prompt_s), len(done.token_s)
            rows = None if done.rung.batched else 1
            done.read(workload.prompts[:rows], workload.more)
            if done_rounds == 0:  # what came before was a warm-up
                del done.prompt_s[: first[0]], done.token_s[: first[1]]
        done_rounds += 1


def _reports(runs: Sequence[Run], workload: Workload) -> tuple[RungReport, ...]:
    pairs = zip(runs, (None, *runs), strict=False)
    return tuple(_report(done, before, workload) for done, before in pairs)


def _report(done: Run, before: Run | None, workload: Workload) -> RungReport:
    rung, (words, difference, allowed) = done.rung, done.compared or (None, None, None)
    assert done.work is not None
    change, idea = wording(rung.name, rung.config)
    return RungReport(
        number=rung.number,
        name=rung.name,
        title=WORDS[rung.name].title,
        change=change,
        idea=idea,
        sequences=len(workload.prompts) if rung.batched else 1,
        prompt_s=_spread(done.prompt_s),
        token_s=_spread(done.token_s),
        prompt_work=done.work[0],
        token_work=done.work[1],
        listings=done.listings,
        estimated=None if done.part is None else _part_words(done.part, workload),
        prompt_speedup=_speedup(before.prompt_s, done.prompt_s) if before else None,
        token_speedup=_speedup(before.token_s, done.token_s) if before else None,
        compared=words,
        difference=difference,
        allowed=allowed,
    )


def _spread(seconds: Sequence[float]) -> Spread:
    """Median, least and most of repeated runs."""
    middle = statistics.median(seconds)
    return Spread(median=middle, lowest=min(seconds), highest=max(seconds), runs=len(seconds))


def _speedup(before: Sequence[float], here: Sequence[float]) -> float:
    """The median ratio of neighbouring runs; of the medians where they were not run in turns."""
    if len(before) != len(here):
        return statistics.median(before) / statistics.median(here)
    return statistics.median(a / b for a, b in zip(before, here, strict=True))


def _work(rung: Rung, workload: Workload) -> tuple[Work, Work]:
    """Products for the prompt, and on average for a token after it; each sequence's share."""
    prompt, rows, g, share = workload.prompts[0], workload.more, len(workload.more), 1.0
    if isinstance(rung, Loops):
        return loop_work(rung.config, len(prompt), g)
    if rung.batched:
        prompt, share = workload.prompts, 1 / len(workload.prompts)
        rows = rows.unsqueeze(1).expand(-1, len(prompt))
    first = count(lambda: rung.start(prompt))
    later = [count(partial(rung.extend, id)) for id in rows]
    return first.scaled(share), sum(later[1:], later[0]).scaled(share / g)


def _part_words(tokens: int, workload: Workload) -> str:
    size = workload.prompts.shape[1]
    return f"block 0 alone, {f'{tokens} of the {size}' if tokens < size else f'all {size}'} tokens"
