"""The distribution that sampling claims, slowly and in plain Python; no code of ours."""

import math
from typing import Any


def distribution(
    logits: list[float], prompt: list[int], output: list[int], options: Any
) -> tuple[list[float], float]:
    """Probabilities after all filters, and how near any threshold comes to being met exactly."""
    scores = []
    for x, p, o in zip(logits, prompt, output, strict=True):
        if p or o:
            x = x / options.repetition_penalty if x > 0 else x * options.repetition_penalty
        x -= options.presence_penalty if o else 0.0
        x -= options.frequency_penalty * o
        scores.append(x)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if options.temperature == 0:
        best = max(scores)
        runners = [best - x for x in scores if x < best]
        margin = min(runners, default=1.0)
        return [float(i == scores.index(best)) for i in range(len(scores))], margin
    best = max(scores)
    weights = [math.exp((x - best) / options.temperature) for x in scores]
    if options.top_k:
        order = order[: options.top_k]
    margin = 1.0
    total = math.fsum(weights[i] for i in order)
    if options.top_p < 1:
        kept: list[int] = []
        for i in order:
            share = math.fsum(weights[j] for j in kept) / total
            margin = min(margin, abs(share - options.top_p))
            if share >= options.top_p:
                break
            kept.append(i)
        order = kept
    for i in order:
        margin = min(margin, abs(weights[i] - options.min_p) if 0 < options.min_p < 1 else 1.0)
    order = [i for i in order if weights[i] >= options.min_p]
    total = math.fsum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(scores))], margin
