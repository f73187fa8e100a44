"""Climbs the ladder: every rung reads the same tokens, is compared with the one below and timed.

Letters: b sequences, n tokens of the prompt, g tokens read one by one after it, V vocabulary,
d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmcli.ladder.clock import spread, timed
from llmcli.ladder.count import count, loop_work, matrix_multiply_adds
from llmcli.ladder.course import Course, Progress
from llmcli.ladder.loops import Loops, multiply_adds
from llmcli.ladder.rung import Rung, silent
from llmcli.ladder.rungs import RUNGS
from llmcli.ladder.trace import Trace
from llmcli.ladder.weights import Weights
from llmcli.reports.ladder import RungReport, Shown, Work

# What rounding may change. Logits: absolute; rows inside the model, whose largest numbers are
# thousands in some layers: relative to the largest.
ALLOWED = {torch.float32: 1e-4, torch.float64: 1e-9}
ALLOWED_INSIDE = {torch.float32: 1e-5, torch.float64: 1e-12}
LOOP_S = 1e-7  # a multiply-add of the loops on a slow machine: decides what is estimated
NO_WORK = Work(gemv=0, gemm=0, flops=0, bytes=0)
ONCE_S = 2.0  # a rung that takes longer for its first pass is not run again


class CutShort(KeyboardInterrupt):
    """Ctrl-C in the middle of the climb. `rungs`: the reports of those that were reached."""

    def __init__(self, rungs: tuple[RungReport, ...]) -> None:
        super().__init__()
        self.rungs = rungs


@dataclass(kw_only=True)
class _Climbed:
    """A rung that was run: logits `out` `[b or 1, n + g, V]` and seconds of each pass.

    Where `part` is not None, `out` are the rows `[part, d]` after layer 0, and the seconds are
    scaled up from it.
    """

    rung: Rung
    out: Tensor
    part: int | None = None
    steps: tuple[Shown, ...] = ()
    prompt_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    work: tuple[Work, Work] = (NO_WORK, NO_WORK)
    compared: tuple[str, float, float] | None = None

    def read(self, prompts: Tensor, more: Tensor) -> Tensor:
        """Reads the prompts and the tokens after them; logits `[b, n + g, V]`, times kept."""
        if not self.rung.batched:
            return torch.stack([self._read(prompt, more) for prompt in prompts])
        return self._read(prompts, more.unsqueeze(1).expand(-1, len(prompts)))

    def _read(self, prompt: Tensor, more: Tensor) -> Tensor:
        share = prompt.shape[0] if self.rung.batched else 1
        first, seconds = timed(lambda: self.rung.start(prompt))
        self.prompt_s.append(seconds / share)
        rows = [first]
        for id in more:
            row, seconds = timed(lambda id=id: self.rung.extend(id))  # type: ignore[misc]
            self.token_s.append(seconds / share)
            rows.append(row.unsqueeze(-2))
        return torch.cat(rows, -2)


@torch.inference_mode()
def climb(
    weights: Weights,
    run: Course,
    *,
    numbers: Sequence[int] = (),
    progress: Progress | None = None,
) -> tuple[RungReport, ...]:
    """Runs the rungs `numbers` (default: all) from the lowest up and reports each.

    A rung's difference is taken over the logits of every prompt token and of every token read
    after it; where one of the two was too slow to run whole, over the rows after layer 0.
    Raises CutShort where Ctrl-C ends it.
    """
    climbed: list[_Climbed] = []
    try:
        _climb(weights, run, numbers, climbed, progress)
        _again(climbed, run, progress)
    except KeyboardInterrupt as stop:
        raise CutShort(_reports(climbed, run)) from stop
    return _reports(climbed, run)


def _climb(
    weights: Weights,
    run: Course,
    numbers: Sequence[int],
    climbed: list[_Climbed],
    progress: Progress | None,
) -> None:
    """The first pass of every rung, each compared with the one below; fills `climbed`."""
    kinds = [kind for kind in RUNGS if not numbers or kind.number in numbers]
    for index, kind in enumerate(kinds):
        if progress is not None:
            progress(f"rung {kind.number}: {kind.name}", index, len(kinds))
        # the rung below a batch reads every sequence of it too, one after the other
        batched = any(near.batched for near in kinds[index : index + 2])
        done = _run(kind(weights), run, len(run.prompts) if batched else 1)
        done.work = _work(done, run)
        if climbed:
            done.compared = _compare(climbed[-1], done, run)
            climbed[-1].out = torch.empty(0)  # the logits of a long prompt are large
        climbed.append(done)


def _run(rung: Rung, run: Course, rows: int) -> _Climbed:
    """The first pass, with the steps that the rung shows."""
    trace = Trace()
    done = _part(rung, run, trace)
    if done is None:
        rung.prepare()
        rung.show = trace
        done = _Climbed(rung=rung, out=torch.empty(0))
        done.out = done.read(run.prompts[:rows], run.more)
    done.steps = trace.steps
    rung.show = silent
    return done


def _part(rung: Rung, run: Course, trace: Trace) -> _Climbed | None:
    """Layer 0 of the prompt (of as many tokens as fit the budget), where the whole would not."""
    size, g = run.prompts.shape[1], len(run.more)
    tokens = size
    if isinstance(rung, Loops):
        lengths = range(size, size + g + 1)
        if sum(multiply_adds(rung.config, n) for n in lengths) * LOOP_S <= run.budget:
            return None
        while tokens > 1 and multiply_adds(rung.config, tokens, 0) * LOOP_S > run.budget:
            tokens -= 1
    rung.prepare(0)
    ids = run.prompts[:1, :tokens] if rung.batched else run.prompts[0, :tokens]
    if isinstance(rung, Loops):
        rung.show = trace
    else:
        rung.forward(ids, 0)  # a warm-up
    out, seconds = timed(lambda: rung.forward(ids, 0))
    whole = seconds * _ratio(rung, size, tokens)
    if not isinstance(rung, Loops):
        if whole * (1 + g) <= run.budget:
            return None
        rung.show = trace
        rung.forward(ids, 0)
    return _Climbed(
        rung=rung,
        out=out.reshape(tokens, -1),
        part=tokens,
        prompt_s=[whole],
        token_s=[seconds * _ratio(rung, size + 1, tokens)],
    )


def _ratio(rung: Rung, tokens: int, part: int) -> float:
    """How many times the work of layer 0 for `part` tokens the whole of `tokens` is."""
    adds = multiply_adds if isinstance(rung, Loops) else matrix_multiply_adds
    return adds(rung.config, tokens) / adds(rung.config, part, 0)


def _compare(below: _Climbed, above: _Climbed, run: Course) -> tuple[str, float, float]:
    """What was compared, the largest difference, and what rounding may explain."""
    dtype = above.rung.weights.decoder.dtype
    if below.part is None and above.part is None:
        rows = min(len(below.out), len(above.out))
        largest = _difference(below.out[:rows], above.out[:rows])
        return "logits", largest, ALLOWED[dtype]
    tokens = min(done.part for done in (below, above) if done.part is not None)
    one, other = (_rows(done, run, tokens) for done in (below, above))
    words = f"layer 0, {tokens} of {run.prompts.shape[1]} tokens"
    return words, _difference(one, other), ALLOWED_INSIDE[dtype] * other.abs().max().item()


def _rows(done: _Climbed, run: Course, tokens: int) -> Tensor:
    """The rows `[tokens, d]` after layer 0: a causal model's first rows need no later token."""
    if done.part is not None:
        return done.out[:tokens]
    ids = run.prompts[:1, :tokens] if done.rung.batched else run.prompts[0, :tokens]
    return done.rung.forward(ids, 0).reshape(tokens, -1)


def _difference(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


def _again(climbed: Sequence[_Climbed], run: Course, progress: Progress | None) -> None:
    """Times the rungs that are fast in turns, so that a noisy moment hits all of them alike."""
    fast = [c for c in climbed if c.part is None and sum(c.prompt_s + c.token_s) <= ONCE_S]
    for number in range(run.rounds):
        if progress is not None:
            progress("timing", number, run.rounds)
        for done in fast:
            first = len(done.prompt_s), len(done.token_s)
            done.read(run.prompts if done.rung.batched else run.prompts[:1], run.more)
            if number == 0:  # what came before was a warm-up
                del done.prompt_s[: first[0]], done.token_s[: first[1]]


def _reports(climbed: Sequence[_Climbed], run: Course) -> tuple[RungReport, ...]:
    reports: list[RungReport] = []
    for done in climbed:
        prompt_s, token_s = spread(done.prompt_s), spread(done.token_s)
        prompt_work, token_work = done.work
        below = reports[-1] if reports else None
        words, difference, allowed = done.compared or (None, None, None)
        reports.append(
            RungReport(
                number=done.rung.number,
                name=done.rung.name,
                title=done.rung.title,
                change=done.rung.change,
                idea=done.rung.idea,
                sequences=len(run.prompts) if done.rung.batched else 1,
                prompt_s=prompt_s,
                token_s=token_s,
                prompt_work=prompt_work,
                token_work=token_work,
                steps=done.steps,
                estimated=None if done.part is None else _part_words(done.part, run),
                prompt_speedup=below.prompt_s.median / prompt_s.median if below else None,
                token_speedup=below.token_s.median / token_s.median if below else None,
                compared=words,
                difference=difference,
                allowed=allowed,
            )
        )
    return tuple(reports)


def _work(done: _Climbed, run: Course) -> tuple[Work, Work]:
    """Products for the prompt and for one token more, each sequence's share."""
    rung, size = done.rung, run.prompts.shape[1]
    if isinstance(rung, Loops):
        return loop_work(rung.config, size), loop_work(rung.config, size + 1)
    prompt = run.prompts if rung.batched else run.prompts[0]
    if done.part is not None:
        one = count(lambda: rung.forward(prompt[..., : done.part], 0))
        return one.scaled(_ratio(rung, size, done.part)), one.scaled(
            _ratio(rung, size + 1, done.part)
        )
    share = 1 / len(run.prompts) if rung.batched else 1.0
    first = run.more[0].expand(prompt.shape[:-1])
    return (
        count(lambda: rung.start(prompt)).scaled(share),
        count(lambda: rung.extend(first)).scaled(share),
    )


def _part_words(tokens: int, run: Course) -> str:
    size = run.prompts.shape[1]
    return f"layer 0 of {f'{tokens} of {size}' if tokens < size else size} tokens"
