"""`engine.stream` for tests: the request's fields as arguments; the same in a plain loop."""

import torch

from llmcli.engine.sampling import _candidates, penalized, sample
from llmcli.engine.seeds import uniforms
from llmcli.engine.stream import TextRequest
from llmcli.engine.stream import stream as stream_request


def stream(
    model, prompts, sampling, *, on_prefill=None, on_reprefill=None, speculation=None, **fields
):
    """Tokens behind the prompts; `fields` are those of `TextRequest`."""
    request = TextRequest(prompts=prompts, sampling=sampling, **fields)
    return stream_request(
        model, request, on_prefill=on_prefill, on_reprefill=on_reprefill, speculation=speculation
    )


def filtered(logits, sampling, prompt=None, output=None):
    """The distribution `[B, V]` in float64 that the next token is drawn from (`choose`)."""
    scores = penalized(logits, sampling, prompt, output)
    if sampling.greedy:
        probs = torch.zeros(scores.shape, dtype=torch.float64)
        return probs.scatter_(1, scores.max(-1, keepdim=True).indices, 1.0)
    weights, ids = _candidates(scores, scores.amax(-1, keepdim=True), sampling)
    probs = weights / weights.sum(-1, keepdim=True)
    return probs if ids is None else probs.new_zeros(scores.shape).scatter_(1, ids, probs)


def plain_loop(logits_of, prompt, sampling, limit, end):
    """Generation as one would write it first: all logits `[V]` anew for every token."""
    out = []
    while len(out) < limit and (not out or out[-1] != end):
        logits = logits_of([*prompt, *out])[None]
        counts = [
            torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=logits.shape[1])[None]
            for ids in (prompt, out)
        ]
        u = torch.tensor(uniforms(sampling.seed, 0, len(out), 1), dtype=torch.float64)
        out.append(int(sample(filtered(logits, sampling, *counts), u)[0]))
    return out
