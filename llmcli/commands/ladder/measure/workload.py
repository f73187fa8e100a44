"""What the rungs read, planned once for all of them.

Letters: b sequences, n tokens of the prompt, g tokens read one by one after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.weights import Weights
from llmcli.devices import require_memory
from llmcli.engine.session import Session
from llmcli.errors import NotFinite


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
    decoder = weights.decoder
    _require_memory(weights, len(ids) + more, sequences)
    prompt = torch.tensor(ids, device=decoder.device)
    session = Session(decoder, 1, len(ids) + more)
    session.extend(prompt[None])
    chosen = list(islice(session.decode(_likeliest), more))
    prompts = torch.stack([prompt.roll(-shift) for shift in range(sequences)])
    for number in range(len(ids), sequences):
        prompts[number, 0] = (prompts[number, 0] + number) % weights.config.vocab
    return Workload(prompts=prompts, more=torch.stack(chosen), budget=budget, rounds=rounds)


def _likeliest(logits_1V: Tensor) -> tuple[Tensor, Tensor]:
    if not logits_1V.isfinite().all():
        raise NotFinite(
            "the model's logits are not finite", hint="the checkpoint may hold NaN or infinity"
        )
    id_1 = logits_1V.argmax(-1)
    return id_1, id_1[0]


def _require_memory(weights: Weights, tokens: int, sequences: int) -> None:
    """Rungs 4 to 7 own a copy of W_q, W_k and W_v each, and two of them hold logits at a time."""
    copied = sum(matrix.W.numel() for layer in weights.attentions for matrix in layer.entering)
    logits = sequences * tokens * weights.config.vocab
    size = weights.decoder.dtype.itemsize
    require_memory(
        (4 * copied + 3 * logits) * size,
        weights.decoder.device,
        "the rungs' own weights and logits",
        "take a shorter prompt or a smaller --batch",
    )
