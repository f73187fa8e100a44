"""What is run, in which order, and on which tokens: as llama-bench does it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from llmcli.anatomy.work import prompt_calls
from llmcli.commands.bench.report.results import Settings, Test
from llmcli.graph.spec import Call, Logits


def all_tests(
    n_prompt: Sequence[int],
    n_gen: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    depths: Sequence[int] = (0,),
) -> tuple[Test, ...]:
    """At each depth all prompts, then all generations, then all pairs of both; 0 is no test."""
    found = []
    for depth in depths:
        both = [(n, 0) for n in n_prompt] + [(0, n) for n in n_gen] + list(pairs)
        found += [Test(n_prompt=p, n_gen=g, depth=depth) for p, g in both if p or g]
    return tuple(found)


def same_engine(one: Settings, other: Settings) -> bool:
    """Whether one engine serves both: they differ in what `Engine.start` is told, at most."""
    return one == replace(
        other, n_batch=one.n_batch, n_ubatch=one.n_ubatch, n_threads=one.n_threads
    )


def chunk(settings: Settings) -> int:
    """Tokens of one forward call: `n_ubatch`, which is at most `n_batch` (llama.cpp's rule)."""
    return min(settings.n_ubatch, settings.n_batch)


def pieces(tokens: int, settings: Settings) -> list[int]:
    """A prompt in pieces of `n_batch`; each is read in calls of `chunk`."""
    whole, rest = divmod(tokens, settings.n_batch)
    return [settings.n_batch] * whole + [rest] * (rest > 0)


def calls(tokens: int, settings: Settings, depth: int = 0) -> Iterator[tuple[Call, Logits]]:
    """The forward calls that read a prompt after `depth` tokens; each piece ends with logits."""
    past = depth
    for piece in pieces(tokens, settings):
        yield from prompt_calls(batch=1, tokens=piece, past=past, chunk=chunk(settings))
        past += piece


def needed(test: Test) -> int:
    """Tokens that the memory must have room for."""
    return test.depth + test.tokens


def ids(seed: int, what: str, tokens: int, vocab: int, bos: int | None) -> list[int]:
    """Random ids, the same for every engine: with BOS in front where there is one.

    `what` names the run, so that no two runs read the same text.
    """
    draw = random.Random(f"{seed} {what}")
    found = [draw.randrange(vocab) for _ in range(tokens)]
    if bos is not None and found:
        found[0] = bos
    return found
