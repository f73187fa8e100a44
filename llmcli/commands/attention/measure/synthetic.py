"""A prompt for induction and duplicate-token heads: random tokens, and the same ones again."""

from __future__ import annotations

import random

from llmcli.errors import UsageError
from llmcli.model import Model


def synthetic(model: Model, count: int, seed: int) -> list[int]:
    """BOS where the model has one, `count` different random tokens, then these again.

    None of them is special, so that a text that repeats is all there is to see (Olsson et al.
    2022, appendix: "prefix matching"). The same `seed`, the same tokens. Raises UsageError where
    the vocabulary has fewer, or `count` is below 1.
    """
    known, special = model.tokenizer, set(model.config.eos)
    if model.config.bos is not None:
        special.add(model.config.bos)
    if known is not None:
        special |= known.special_ids
    plain = [
        id
        for id in range(model.config.vocab)
        if id not in special and (known is None or known.has(id))
    ]
    if not 1 <= count <= len(plain):
        raise UsageError(
            f"`--synthetic {count}` asks for as many different tokens",
            hint=f"use a number from 1 to {len(plain)}",
        )
    drawn = random.Random(seed).sample(plain, count)
    front = [] if model.config.bos is None else [model.config.bos]
    return [*front, *drawn, *drawn]
