"""The softmax of rows: values, bounds, and one number with its row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from llmcli.evaluate.numbers import Number, fact, leaf
from llmcli.evaluate.rule import Reader
from llmcli.records.explanation import Term

NO_SINK = torch.tensor(-math.inf, dtype=torch.float64)


def softmax(s: Tensor, sink: Tensor = NO_SINK) -> Tensor:
    """Weights `[…, S]` of scores, after subtracting the maximum; a sink takes part in the sum."""
    return _weights(s, sink)[0]


def _weights(s: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights `[…, S]`, the share of the sink `[…, 1]`, and the maximum of both `[…, 1]`."""
    top = torch.maximum(s.amax(-1, keepdim=True), sink)
    e, taken = torch.exp(s - top), torch.exp(sink - top)
    every = e.sum(-1, keepdim=True) + taken
    return e / every, taken / every, top


def uncertainty(s: Tensor, size: Tensor | float = 0.0, sink: Tensor = NO_SINK) -> Tensor:
    """Uncertainty of weights `[…, S]` in eps, for scores `s` with magnitudes `size`.

    The relative error of a weight is the error of its score plus that of the sum: e^x(1 + dx). A
    sink's score is exact.
    """
    a, taken, top = _weights(s, sink)
    off = size + torch.where(s == -math.inf, 0.0, top - s)
    in_sum = (a * off).sum(-1, keepdim=True)
    in_sum = in_sum + torch.where(sink == -math.inf, 0.0, taken * (top - sink))
    return a * (1 + off + in_sum)


def share(
    read: Reader,
    row: Mapping[int, float],
    at: int,
    cell: Callable[[int | str], str],
    over: str,
    *,
    columns: tuple[str, ...] = (),
    sink: Number | None = None,
) -> Number:
    """The weight at `at` in a row of scores with the symbols `cell`; 0 if it is not in the row.

    `columns`: of a table of scores, exponentials and weights of tokens.
    """
    running, peak = cell(over), f"max {cell(over)} over {over}"
    top = max(row.values()) if sink is None else max(float(sink.x), *row.values())
    exps = {i: math.exp(x - top) for i, x in row.items()}
    total = leaf(math.fsum(exps.values()), "Σ")
    if sink is not None:
        peak = f"max({sink.words}, {peak})"
        taken = leaf(math.exp(float(sink.x) - top), f"e^({sink.words} − max)")
        total = (total + taken).line()
    read.before = (fact(f"max = {peak}", top),)
    every, texts = float(total.x), read.values.texts
    terms = tuple(Term(at=i, parts=(), value=e) for i, e in exps.items())
    if columns:
        terms = tuple(
            replace(term, parts=(row[i], term.value, term.value / every), label=texts[i])
            for i, term in zip(exps, terms, strict=True)
        )
    read.summed(f"e^({running} − max)", terms, over, columns)
    return leaf(exps.get(at, 0.0), f"e^({cell(at) if at in row else '−∞'} − max)") / total
