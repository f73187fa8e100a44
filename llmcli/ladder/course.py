"""What the rungs read, planned once for all of them.

Letters: b sequences, n tokens of the prompt, g tokens read one by one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcli.ladder.weights import Weights

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, kw_only=True)
class Course:
    """What the rungs read. `prompts` `[b, n]`: the prompt, then its rotations, for the batch.

    `more` `[g]` are read one by one after the prompt. `budget`: seconds that a rung may take
    before it is estimated from a part; `rounds`: how often the fast ones are timed.
    """

    prompts: Tensor
    more: Tensor
    budget: float = 20.0
    rounds: int = 5


def plan_course(
    weights: Weights,
    ids: Sequence[int],
    *,
    more: int,
    sequences: int,
    budget: float = 20.0,
    rounds: int = 5,
) -> Course:
    """The prompt in `sequences` rotations, and the `more` tokens the model continues it with."""
    decoder = weights.decoder
    prompt = torch.tensor(ids, device=decoder.device)
    state = decoder.new_state(1, len(ids) + more)
    row, chosen = prompt, []
    for _ in range(more):
        row = decoder(row.reshape(1, -1), state, logits="last")[0, -1].argmax()
        chosen.append(row)
    return Course(
        prompts=torch.stack([prompt.roll(-shift) for shift in range(sequences)]),
        more=torch.stack(chosen),
        budget=budget,
        rounds=rounds,
    )
