"""Runs the ladder: every rung reads the same tokens, is compared with the one below and timed.

Letters: b sequences, n tokens of the prompt, g tokens read one by one after it, V vocabulary,
d width.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.loops import Loops, multiply_adds
from llmcli.commands.ladder.measure.record import NOTHING, Recorder, count
from llmcli.commands.ladder.measure.rungs import (
    Batch,
    CombinedQKV,
    FusedKernels,
    HeadsAsDimension,
    KeyValueCache,
    Matrices,
    VectorRows,
)
from llmcli.commands.ladder.measure.texts import text_of
from llmcli.commands.ladder.measure.walk import Rung
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.commands.ladder.report import NAMES, Listing, RungReport, Spread, Work
from llmcli.devices import require_memory
from llmcli.engine.session import Session
from llmcli.errors import NotFinite
from llmcli.measure.runs import in_turns, paired, timed
from llmcli.records.work import Progress, no_progress

# all of them, from the lowest up, as `NAMES` calls them
RUNGS: tuple[type[Rung], ...] = (
    *(Loops, VectorRows, Matrices, HeadsAsDimension),
    *(CombinedQKV, KeyValueCache, Batch, FusedKernels),
)

LOOP_S = 1e-7  # a multiply-add of the loops on a slow machine: decides what is estimated

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


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the rungs read. `prompts` `[b, n]`: the prompt, then its rotations, for the batch.

    No two are alike, also where there are more of them than tokens: the first id is another then.

    `more` `[g]` are read one by one after the prompt. `budget`: seconds that a rung may take
    before it is estimated from a part; `rounds`: how often the fast ones are timed.
    """

    prompts: Tensor
    more: Tensor
    budget: float = 20.0
    rounds: int = 5


def plan_workload(
    weights: Weights,
    ids: Sequence[int],
    *,
    more: int,
    sequences: int,
    budget: float = 20.0,
    rounds: int = 5,
) -> Workload:
    """The prompt in `sequences` rotations, and the `more` tokens the model continues it with.

    Raises NotFinite where the model's own logits are not, OutOfMemory where the rungs do not
    fit.
    """
    decoder, vocab = weights.decoder, weights.config.vocab
    # rungs 4 to 7 own a copy of W_q, W_k and W_v each, and two of them hold logits at a time
    copied = sum(matrix.W.numel() for layer in weights.attentions for matrix in layer.entering)
    require_memory(
        (4 * copied + 3 * sequences * (len(ids) + more) * vocab) * decoder.dtype.itemsize,
        decoder.device,
        "the rungs' own weights and logits",
        "take a shorter prompt or a smaller --batch",
    )
    prompt = torch.tensor(ids, device=decoder.device)
    session = Session(decoder, 1, len(ids) + more)
    session.extend(prompt[None])
    chosen = list(islice(session.decode(_likeliest), more))
    prompts = torch.stack([prompt.roll(-shift) for shift in range(sequences)])
    for number in range(len(ids), sequences):
        prompts[number, 0] = (prompts[number, 0] + number) % vocab
    return Workload(prompts=prompts, more=torch.stack(chosen), budget=budget, rounds=rounds)


def _likeliest(logits_1V: Tensor) -> tuple[Tensor, Tensor]:
    if not logits_1V.isfinite().all():
        raise NotFinite(
            "the model's logits are not finite", hint="the checkpoint may hold NaN or infinity"
        )
    id_1 = logits_1V.argmax(-1)
    return id_1, id_1[0]


@dataclass(kw_only=True)
class Run:
    """A rung that was run: logits `out` `[b or 1, n + g, V]` and seconds of each pass.

    `work`: of the prompt, and of a token after it. Where `part` is not None, `out` are the rows
    `[part, d]` after block 0, and the seconds are scaled up from it.
    """

    rung: Rung
    work: tuple[Work, Work]
    out: Tensor = field(default_factory=lambda: torch.empty(0))
    part: int | None = None
    listings: tuple[Listing, ...] = ()
    prompt_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    difference: dict[str, Any] = field(default_factory=dict)  # members of its report

    def read(self, prompts: Tensor, more: Tensor) -> Tensor:
        """Reads the prompts and the tokens after them; logits `[b, n + g, V]`, times kept."""
        share = len(prompts) if self.rung.batched else 1
        outs = []
        for start, *extends in _calls(self.rung, prompts, more):
            out, seconds = timed(prompts.device, start)
            self.prompt_s.append(seconds / share)
            rows = [out]
            for extend in extends:
                row, seconds = timed(prompts.device, extend)
                self.token_s.append(seconds / share)
                rows.append(row.unsqueeze(-2))
            outs.append(torch.cat(rows, -2))
        return outs[0] if self.rung.batched else torch.stack(outs)


def _calls(rung: Rung, prompts: Tensor, more: Tensor) -> list[list[Callable[[], Tensor]]]:
    """The calls that read each prompt, or all at once, and then the tokens after it."""
    inputs = [(prompt, more) for prompt in prompts]
    if rung.batched:
        inputs = [(prompts, more.unsqueeze(1).expand(-1, len(prompts)))]
    return [
        [partial(rung.start, prompt), *(partial(rung.extend, id) for id in ids)]
        for prompt, ids in inputs
    ]


@torch.inference_mode()
def run_ladder(
    weights: Weights,
    workload: Workload,
    *,
    numbers: Sequence[int] = (),
    progress: Progress = no_progress,
    record: bool = False,
) -> tuple[RungReport, ...]:
    """Runs the rungs `numbers` (default: all) from the lowest up and reports each.

    With `record` the lines that ran are in the reports, too. A rung's difference is taken over the
    logits of every prompt token and of every token read after it; where one of the two was too slow
    to run whole, over the rows after block 0. Raises LadderInterrupted where Ctrl-C ends it.
    """
    runs: list[Run] = []
    numbers = sorted(numbers) or range(1, len(RUNGS) + 1)
    kinds = [RUNGS[number - 1] for number in numbers]

    def reports() -> tuple[RungReport, ...]:
        pairs = zip(runs, (None, *runs), strict=False)
        return tuple(_report(run, below, workload) for run, below in pairs)

    try:
        for index, (number, kind) in enumerate(zip(numbers, kinds, strict=True)):
            progress(f"rung {number}: {NAMES[number - 1]}", index, len(kinds))
            # the rung below a batch reads every sequence of it too, one after the other
            batched = any(near.batched for near in kinds[index : index + 2])
            recorder = Recorder(kind.extend, on=record)
            done = _run(kind, weights, workload, len(workload.prompts) if batched else 1, recorder)
            done.listings = recorder.listings
            if runs:
                done.difference = _compare(runs[-1], done, workload)
                runs[-1].out = torch.empty(0)  # the logits of a long prompt are large
            runs.append(done)
        _time_in_turns(runs, workload, progress)
    except KeyboardInterrupt as stop:
        raise LadderInterrupted(reports()) from stop
    return reports()


def _run(
    kind: type[Rung], weights: Weights, workload: Workload, rows: int, recorder: Recorder
) -> Run:
    """The first pass, or what one block lets expect; rungs with a cache are never estimated."""
    with recorder:
        rung = kind(weights)
    done = None
    if isinstance(rung, Loops):
        done = _of_loops(rung, workload, recorder)
    elif kind.extend is Rung.extend:
        done = _of_matrices(rung, workload, rows, recorder)
    if done is None:
        done = Run(rung=rung, work=_work(rung, workload))
        rung.tap = recorder.tap if recorder.on else None
        with recorder:
            done.out = done.read(workload.prompts[:rows], workload.more)
        rung.tap = None
    return done


def _one_block(weights: Weights) -> Weights:
    """The model cut after its first block, the head still on."""
    config = replace(weights.config, layers=weights.config.layers[:1])
    return replace(weights, config=config, blocks=weights.blocks[:1])


def _of_loops(whole: Loops, workload: Workload, recorder: Recorder) -> Run | None:
    """The first block of as many tokens as fit the budget, scaled by the multiply-adds."""
    config, n, budget = whole.config, workload.prompts.shape[1], workload.budget
    work = _work(whole, workload)
    prompt, token = (one.flops / 2 for one in work)  # multiply-adds
    if (prompt + len(workload.more) * token) * LOOP_S <= budget:
        whole.prepare()
        return None
    fitting = (m for m in range(1, n + 1) if multiply_adds(config, m, 0) * LOOP_S > budget)
    m = max(1, next(fitting, n + 1) - 1)
    rung, ids = Loops(_one_block(whole.weights)), workload.prompts[0, :m]
    rung.prepare(0)
    with recorder:
        out, seconds = timed(ids.device, lambda: rung.forward(ids, 0))
    pace = seconds / multiply_adds(config, m, 0)
    return Run(
        rung=whole,
        work=work,
        out=out,
        part=m,
        prompt_s=[pace * prompt],
        token_s=[pace * token],
    )


def _of_matrices(whole: Rung, workload: Workload, rows: int, recorder: Recorder) -> Run | None:
    """The first block of all tokens, as often as there are blocks, and the head once."""
    rung, others = type(whole)(_one_block(whole.weights)), len(whole.weights.blocks) - 1
    prompt, g = workload.prompts[0], len(workload.more)
    halfway = torch.cat((prompt, workload.more[: (g + 1) // 2]))  # what a token costs grows evenly

    def seconds(ids: Tensor) -> tuple[float, float]:
        """Of the head and one block, and of one block alone."""
        calls = partial(rung.start, ids), partial(rung.forward, ids, 0)
        start, block = (timed(prompt.device, call)[1] for call in calls)
        return start, block

    def work(ids: Tensor) -> Work:
        one = count(lambda: rung.forward(ids, 0))
        return count(lambda: rung.start(ids)) + one.scaled(others)

    least = [inf] * 4
    for _ in range(3):  # the first is a warm-up, and others may use the machine
        least = list(map(min, least, (*seconds(prompt), *seconds(halfway))))
        prompt_s, token_s = least[0] + others * least[1], least[2] + others * least[3]
        if (prompt_s + g * token_s) * rows <= workload.budget:
            return None
    with recorder:
        out = rung.forward(prompt, 0)
    return Run(
        rung=whole,
        work=(work(prompt), work(halfway)),
        out=out,
        part=len(out),
        prompt_s=[prompt_s],
        token_s=[token_s],
    )


def _compare(below: Run, above: Run, workload: Workload) -> dict[str, Any]:
    """What was compared, the largest difference, and what rounding may explain."""
    least, words = 0.0, "logits"
    if below.part is None and above.part is None:
        rows, least = min(len(below.out), len(above.out)), LEAST
        one, other = below.out[:rows].flatten(0, 1), above.out[:rows].flatten(0, 1)
    else:
        tokens = min(done.part for done in (below, above) if done.part is not None)
        one, other = (_rows(done, workload, tokens) for done in (below, above))
        words = f"rows of {tokens} of {workload.prompts.shape[1]} tokens after block 0"
    # in blocks of rows, on the CPU, where the loops' numbers are; NaN if any is
    off = [
        (one[at : at + BLOCK].cpu().double() - other[at : at + BLOCK].cpu().double()).abs().max()
        for at in range(0, len(one), BLOCK)
    ]
    allowed = ALLOWED[above.rung.weights.decoder.dtype] * max(least, other.abs().max().item())
    return {"compared": words, "difference": torch.stack(off).max().item(), "allowed": allowed}


def _rows(done: Run, workload: Workload, tokens: int) -> Tensor:
    """The rows `[tokens, d]` after block 0: a causal model's first rows need no later token."""
    if done.part is not None:
        return done.out[:tokens]
    ids = workload.prompts[:1, :tokens] if done.rung.batched else workload.prompts[0, :tokens]
    return done.rung.forward(ids, 0).reshape(tokens, -1)


def _time_in_turns(runs: Sequence[Run], workload: Workload, progress: Progress) -> None:
    """Times the rungs that are fast in turns, so that a noisy moment hits all of them alike."""
    fast = [run for run in runs if run.part is None and sum(run.prompt_s + run.token_s) <= ONCE_S]
    sides = (workload.prompts[: None if run.rung.batched else 1] for run in fast)
    turns = in_turns(
        *(partial(run.read, rows, workload.more) for run, rows in zip(fast, sides, strict=True))
    )
    begin, rounds = perf_counter(), 0
    while rounds < workload.rounds or (
        0 < rounds < MOST_ROUNDS * workload.rounds and perf_counter() - begin < ROUNDS_S
    ):
        progress("timing in turns", min(rounds, workload.rounds), workload.rounds)
        next(turns)
        if rounds == 0:  # what came before was a warm-up
            for run in fast:
                del run.prompt_s[:-1], run.token_s[: -len(workload.more)]
        rounds += 1


def _report(done: Run, below: Run | None, workload: Workload) -> RungReport:
    rung, index = done.rung, RUNGS.index(type(done.rung))
    text = text_of(NAMES[index], rung.config)
    size, estimated = workload.prompts.shape[1], None
    if done.part is not None:
        tokens = f"{done.part} of the {size}" if done.part < size else f"all {size}"
        estimated = f"block 0 alone, {tokens} tokens"
    return RungReport(
        number=index + 1,
        name=NAMES[index],
        title=text.title,
        change=(text.before, text.here),
        idea=text.idea,
        sequences=len(workload.prompts) if rung.batched else 1,
        prompt_s=_spread(done.prompt_s),
        token_s=_spread(done.token_s),
        prompt_work=done.work[0],
        token_work=done.work[1],
        listings=done.listings,
        estimated=estimated,
        prompt_speedup=_speedup(below.prompt_s, done.prompt_s) if below else None,
        token_speedup=_speedup(below.token_s, done.token_s) if below else None,
        **done.difference,
    )


def _spread(seconds: Sequence[float]) -> Spread:
    """Median, least and most of repeated runs."""
    middle = statistics.median(seconds)
    return Spread(median=middle, lowest=min(seconds), highest=max(seconds), runs=len(seconds))


def _speedup(below: Sequence[float], here: Sequence[float]) -> float:
    """The median ratio of neighbouring runs; of the medians where they were not run in turns."""
    if len(below) == len(here):
        return paired(below, here).median
    return statistics.median(below) / statistics.median(here)


def _work(rung: Rung, workload: Workload) -> tuple[Work, Work]:
    """Products for the prompt, and on average for a token after it; each sequence's share."""
    (sequences, n), g = workload.prompts.shape, len(workload.more)
    if isinstance(rung, Loops):
        adds, *more = (multiply_adds(rung.config, n + read) for read in range(g + 1))
        prompt, token = (  # each multiply-add reads two numbers of 8 bytes
            Work(gemv=0, gemm=0, flops=2 * one, bytes=16 * one) for one in (adds, sum(more) / g)
        )
        return prompt, token
    first, *later = map(count, _calls(rung, workload.prompts, workload.more)[0])
    share = 1 / sequences if rung.batched else 1.0
    return first.scaled(share), sum(later, NOTHING).scaled(share / g)
