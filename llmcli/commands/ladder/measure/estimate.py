"""Rungs that would take too long: one block is measured, and the whole is estimated from it.

Letters: n tokens of the prompt, g tokens after it, m tokens that are measured, d width.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from llmcli import devices
from llmcli.commands.ladder.measure.count import count, loop_work, multiply_adds
from llmcli.commands.ladder.measure.record import Recorder
from llmcli.commands.ladder.measure.rungs.loops import Loops
from llmcli.commands.ladder.measure.walk import Rung
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.commands.ladder.measure.workload import Workload
from llmcli.commands.ladder.report import Work

LOOP_S = 1e-7  # a multiply-add of the loops on a slow machine: decides what is estimated


def timed(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What `call` returns, and the seconds until it was there: a GPU is waited for."""
    begin = perf_counter()
    out = call()
    devices.wait_for(out.device)
    return out, perf_counter() - begin


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one block showed. `out`: the rows `[m, d]` after it; seconds and work of the whole."""

    out: Tensor
    prompt_s: float
    token_s: float
    work: tuple[Work, Work]


def estimate(
    kind: type[Rung], weights: Weights, workload: Workload, rows: int, recorder: Recorder
) -> Estimate | None:
    """The estimate, or None for a rung that can read `rows` sequences within the budget.

    Rungs with a cache are never estimated: they are the fast ones.
    """
    if kind is Loops:
        return _of_loops(weights, workload, recorder)
    if kind.extend is not Rung.extend:
        return None
    return _of_matrices(kind, weights, workload, rows, recorder)


def one_block(weights: Weights) -> Weights:
    """The model cut after its first block, the head still on."""
    config = replace(weights.config, layers=weights.config.layers[:1])
    return replace(weights, config=config, blocks=weights.blocks[:1])


def _of_loops(weights: Weights, workload: Workload, recorder: Recorder) -> Estimate | None:
    """The first block of as many tokens as fit the budget, scaled by the multiply-adds."""
    config, n, budget = weights.config, workload.prompts.shape[1], workload.budget
    adds = [multiply_adds(config, n + more) for more in range(len(workload.more) + 1)]
    if sum(adds) * LOOP_S <= budget:
        return None
    fitting = (m for m in range(1, n + 1) if multiply_adds(config, m, 0) * LOOP_S > budget)
    m = max(1, next(fitting, n + 1) - 1)
    rung = Loops(one_block(weights))
    rung.prepare(0)
    with recorder:
        out, seconds = timed(lambda: rung.forward(workload.prompts[0, :m], 0))
    pace = seconds / multiply_adds(config, m, 0)
    return Estimate(
        out=out,
        prompt_s=pace * adds[0],
        token_s=pace * statistics.mean(adds[1:]),
        work=loop_work(config, n, len(workload.more)),
    )


def _of_matrices(
    kind: type[Rung], weights: Weights, workload: Workload, rows: int, recorder: Recorder
) -> Estimate | None:
    """The first block of all tokens, as often as there are blocks, and the head once."""
    rung, others = kind(one_block(weights)), len(weights.blocks) - 1
    prompt, g = workload.prompts[0], len(workload.more)
    halfway = torch.cat((prompt, workload.more[: (g + 1) // 2]))  # what a token costs grows evenly

    def seconds(ids: Tensor) -> float:
        return _least(lambda: rung.start(ids)) + others * _least(lambda: rung.forward(ids, 0))

    def work(ids: Tensor) -> Work:
        one = count(lambda: rung.forward(ids, 0))
        return count(lambda: rung.start(ids)) + one.scaled(others)

    prompt_s, token_s = seconds(prompt), seconds(halfway)
    if (prompt_s + g * token_s) * rows <= workload.budget:
        return None
    with recorder:
        out = rung.forward(prompt, 0)
    return Estimate(out=out, prompt_s=prompt_s, token_s=token_s, work=(work(prompt), work(halfway)))


def _least(call: Callable[[], Tensor]) -> float:
    """The least of three runs: the first is a warm-up, and others may use the machine."""
    return min(timed(call)[1] for _ in range(3))
