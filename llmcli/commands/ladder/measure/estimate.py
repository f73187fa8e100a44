"""A rung's run: what it computed and its seconds, or, where that would take too long, an estimate.

The estimate is from one block, which is measured. Letters: b sequences, n tokens of the prompt,
g tokens after it, m tokens that are measured, d width, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.count import count, loop_work, multiply_adds
from llmcli.commands.ladder.measure.record import Recorder
from llmcli.commands.ladder.measure.rungs.loops import Loops
from llmcli.commands.ladder.measure.walk import Rung
from llmcli.commands.ladder.measure.weights import Weights
from llmcli.commands.ladder.measure.workload import Workload
from llmcli.commands.ladder.report import Listing, Work
from llmcli.measure.runs import timed

LOOP_S = 1e-7  # a multiply-add of the loops on a slow machine: decides what is estimated


@dataclass(kw_only=True)
class Run:
    """A rung that was run: logits `out` `[b or 1, n + g, V]` and seconds of each pass.

    Where `part` is not None, `out` are the rows `[part, d]` after block 0, and the seconds are
    scaled up from it.
    """

    rung: Rung
    out: Tensor = field(default_factory=lambda: torch.empty(0))
    part: int | None = None
    listings: tuple[Listing, ...] = ()
    prompt_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    work: tuple[Work, Work] | None = None
    compared: tuple[str, float, float] | None = None

    def read(self, prompts: Tensor, more: Tensor) -> Tensor:
        """Reads the prompts and the tokens after them; logits `[b, n + g, V]`, times kept."""
        if not self.rung.batched:
            return torch.stack([self._read(prompt, more) for prompt in prompts])
        return self._read(prompts, more.unsqueeze(1).expand(-1, len(prompts)))

    def _read(self, prompt: Tensor, more: Tensor) -> Tensor:
        device, share = _device(self.rung), prompt.shape[0] if self.rung.batched else 1
        first, seconds = timed(device, lambda: self.rung.start(prompt))
        self.prompt_s.append(seconds / share)
        rows = [first]
        for id in more:
            row, seconds = timed(device, partial(self.rung.extend, id))
            self.token_s.append(seconds / share)
            rows.append(row.unsqueeze(-2))
        return torch.cat(rows, -2)


def estimate(rung: Rung, workload: Workload, rows: int, recorder: Recorder) -> Run | None:
    """What one block lets expect, or None for a rung that reads `rows` sequences in the budget.

    Rungs with a cache are never estimated: they are the fast ones.
    """
    if isinstance(rung, Loops):
        return _of_loops(rung, workload, recorder)
    if type(rung).extend is not Rung.extend:
        return None
    return _of_matrices(rung, workload, rows, recorder)


def one_block(weights: Weights) -> Weights:
    """The model cut after its first block, the head still on."""
    config = replace(weights.config, layers=weights.config.layers[:1])
    return replace(weights, config=config, blocks=weights.blocks[:1])


def _of_loops(whole: Loops, workload: Workload, recorder: Recorder) -> Run | None:
    """The first block of as many tokens as fit the budget, scaled by the multiply-adds."""
    config, n, budget = whole.config, workload.prompts.shape[1], workload.budget
    adds = [multiply_adds(config, n + more) for more in range(len(workload.more) + 1)]
    if sum(adds) * LOOP_S <= budget:
        return None
    fitting = (m for m in range(1, n + 1) if multiply_adds(config, m, 0) * LOOP_S > budget)
    m = max(1, next(fitting, n + 1) - 1)
    rung = Loops(one_block(whole.weights))
    rung.prepare(0)
    with recorder:
        out, seconds = timed(_device(rung), lambda: rung.forward(workload.prompts[0, :m], 0))
    pace = seconds / multiply_adds(config, m, 0)
    return Run(
        rung=whole,
        out=out,
        part=m,
        prompt_s=[pace * adds[0]],
        token_s=[pace * statistics.mean(adds[1:])],
        work=loop_work(config, n, len(workload.more)),
    )


def _of_matrices(whole: Rung, workload: Workload, rows: int, recorder: Recorder) -> Run | None:
    """The first block of all tokens, as often as there are blocks, and the head once."""
    rung, others = type(whole)(one_block(whole.weights)), len(whole.weights.blocks) - 1
    prompt, g = workload.prompts[0], len(workload.more)
    halfway = torch.cat((prompt, workload.more[: (g + 1) // 2]))  # what a token costs grows evenly

    def least(call: Callable[[], Tensor]) -> float:
        """Of three runs: the first is a warm-up, and others may use the machine."""
        return min(timed(_device(rung), call)[1] for _ in range(3))

    def seconds(ids: Tensor) -> float:
        return least(lambda: rung.start(ids)) + others * least(lambda: rung.forward(ids, 0))

    def work(ids: Tensor) -> Work:
        one = count(lambda: rung.forward(ids, 0))
        return count(lambda: rung.start(ids)) + one.scaled(others)

    prompt_s, token_s = seconds(prompt), seconds(halfway)
    if (prompt_s + g * token_s) * rows <= workload.budget:
        return None
    with recorder:
        out = rung.forward(prompt, 0)
    done = Run(rung=whole, out=out, part=len(out), prompt_s=[prompt_s], token_s=[token_s])
    done.work = work(prompt), work(halfway)
    return done


def _device(rung: Rung) -> torch.device:
    """Where the model is: a GPU is waited for."""
    return rung.weights.decoder.device
