"""Softmax attention, from one input vector to the output of all heads."""

from __future__ import annotations

import math

from llmcli.ops.twins.vectors import Matrix, Vector, dot, gemv


def softmax(x: Vector) -> list[float]:
    """`exp(x_i) / Σ exp(x_j)`, the maximum subtracted first so that nothing overflows."""
    top = max(x)
    powers = [math.exp(a - top) for a in x]
    total = math.fsum(powers)
    return [p / total for p in powers]


def softmax_in_place(x: list[float]) -> None:
    """The same without a second vector: the sum is one number, known after the second pass."""
    top = max(x)
    total = 0.0
    for i, a in enumerate(x):
        x[i] = math.exp(a - top)
        total += x[i]
    for i, power in enumerate(x):
        x[i] = power / total


def heads(x: Vector, size: int) -> list[Vector]:
    """A projection's output `[heads · size]` cut into its heads, one after the other."""
    return [x[start : start + size] for start in range(0, len(x), size)]


def score(query: Vector, key: Vector) -> float:
    """`q · k / √dh`, dh being their length: how much one token attends to another."""
    return dot(query, key) / math.sqrt(len(query))


def rotate(head: Vector, position: int, frequencies: Vector, factor: float = 1.0) -> list[float]:
    """One head: pair (i, i + N) turned by `position · frequencies[i]` radians, times `factor`."""
    turned = list(head)
    for i, frequency in enumerate(frequencies):
        j = i + len(frequencies)
        cos = math.cos(position * frequency) * factor
        sin = math.sin(position * frequency) * factor
        turned[i] = head[i] * cos - head[j] * sin
        turned[j] = head[j] * cos + head[i] * sin
    return turned


def attend(
    queries: Matrix, keys: Matrix, values: Matrix, *, scale: float, first: int, window: int | None
) -> list[list[float]]:
    """One head, a query at a time: query i stands at position `first + i`, key j at j."""
    out = []
    for i, query in enumerate(queries):
        at = first + i
        start = 0 if window is None else max(0, at - window + 1)
        seen = range(start, min(at + 1, len(keys)))
        scores = [
            scale * math.fsum(a * b for a, b in zip(query, keys[j], strict=True)) for j in seen
        ]
        weights = softmax(scores)
        size = len(values[0])
        out.append(
            [math.fsum(w * values[j][d] for w, j in zip(weights, seen, strict=True))
             for d in range(size)]
        )
    return out


def attention_layer(
    x: Matrix, w_q: Matrix, w_k: Matrix, w_v: Matrix, w_o: Matrix, *, size: int
) -> list[list[float]]:
    """A causal attention layer without positions: `[T, D]` → `[T, D]`.

    `w_q` `[H·dh, D]`; `w_k`, `w_v` `[Hk·dh, D]`; `w_o` `[D, H·dh]`; dh = `size`. Query head h
    reads key/value head h // (H / Hk). The heads' results are concatenated, and `w_o` mixes
    them: without it no head's result could reach another's columns.
    """
    queries = [heads(gemv(w_q, token), size) for token in x]
    keys = [heads(gemv(w_k, token), size) for token in x]
    values = [heads(gemv(w_v, token), size) for token in x]
    group = len(queries[0]) // len(keys[0])
    out = []
    for i, query in enumerate(queries):
        concatenated: list[float] = []
        for h, q in enumerate(query):
            kv = h // group
            weights = softmax([score(q, keys[j][kv]) for j in range(i + 1)])
            for d in range(size):
                column = [values[j][kv][d] for j in range(i + 1)]
                concatenated.append(dot(weights, column))
        out.append(gemv(w_o, concatenated))
    return out
