"""`engine.stream` for tests: the request's fields as arguments; the same in a plain loop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmcli.engine.output import Token
from llmcli.engine.sampling import Sampling, _candidates, penalized, sample
from llmcli.engine.seeds import uniforms
from llmcli.engine.speculation import Speculation
from llmcli.engine.stream import TextRequest
from llmcli.engine.stream import stream as stream_request


def stream(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    on_prefill: Callable[[int, int], None] | None = None,
    on_reprefill: Callable[[int], None] | None = None,
    speculation: Speculation | None = None,
    **fields: Any,
) -> Iterator[Token]:
    """Tokens behind the prompts; `fields` are those of `TextRequest`."""
    request = TextRequest(prompts=prompts, sampling=sampling, **fields)
    return stream_request(
        model, request, on_prefill=on_prefill, on_reprefill=on_reprefill, speculation=speculation
    )


def filtered(
    logits: Tensor, sampling: Sampling, prompt: Tensor | None = None, output: Tensor | None = None
) -> Tensor:
    """The distribution `[B, V]` in float64 that the next token is drawn from (`choose`)."""
    scores = penalized(logits, sampling, prompt, output)
    if sampling.greedy:
        probs = torch.zeros(scores.shape, dtype=torch.float64)
        return probs.scatter_(1, scores.max(-1, keepdim=True).indices, 1.0)
    weights, ids = _candidates(scores, sampling)
    probs = weights / weights.sum(-1, keepdim=True)
    return probs if ids is None else probs.new_zeros(scores.shape).scatter_(1, ids, probs)


def plain_loop(
    logits_of: Callable[[list[int]], Tensor], prompt: Sequence[int], sampling: Sampling,
    limit: int, end: int | None,
) -> list[int]:  # fmt: skip
    """Generation as one would write it first: all logits `[V]` anew for every token."""
    out: list[int] = []
    while len(out) < limit and (not out or out[-1] != end):
        logits = logits_of([*prompt, *out])[None]
        counts = [
            torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=logits.shape[1])[None]
            for ids in (prompt, out)
        ]
        u = torch.tensor(uniforms(sampling.seed, 0, len(out), 1), dtype=torch.float64)
        out.append(int(sample(filtered(logits, sampling, *counts), u)[0]))
    return out
