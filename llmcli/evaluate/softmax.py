"""The softmax of rows: values, bounds, and one number with its row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from llmcli.evaluate.numbers import fact, leaf
from llmcli.records.explanation import Element, Fact, Sum, Term

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
    row: Mapping[int, float],
    at: int,
    cell: Callable[[int | str], str],
    over: str,
    *,
    columns: tuple[str, ...] = (),
    labels: Mapping[int, str] | None = None,
    sink: tuple[str, float] | None = None,
) -> Element:
    """The weight at `at` in a row of scores with the symbols `cell`; 0 if it is not in the row.

    `columns`: of a table of scores, exponentials and weights. `sink`: its symbol and score.
    """
    running = cell(over)
    own, score = sink or ("", -math.inf)
    top = max(score, *row.values())
    exps = {i: math.exp(x - top) for i, x in row.items()}
    summed, taken = math.fsum(exps.values()), math.exp(score - top)
    divisor, peak = leaf(summed, "Σ"), f"max {running} over {over}"
    facts: tuple[Fact, ...] = ()
    if sink is not None:
        every = divisor + leaf(taken, f"e^({own} − max)")
        peak, facts = f"max({own}, {peak})", every.facts()
        divisor = leaf(float(every.x), f"({every.words})")
    if at in row:
        weight = leaf(exps[at], f"e^({cell(at)} − max)") / divisor
        last = weight.facts()[-1]
    else:
        last = fact(f"e^(−∞ − max) / {divisor.words} = 0 / {{}}", 0.0, *divisor.parts)
    formula, total = f"e^({running} − max)", float(divisor.x)
    return Element(
        value=last.value,
        before=(fact(f"max = {peak}", top),),
        sum=Sum(formula=formula, over=over, columns=columns or (formula,), value=summed),
        terms=tuple(
            Term(at=i, parts=(row[i], e, e / total) if columns else (), value=e,
                 label=labels[i] if labels else "")
            for i, e in exps.items()
        ),
        after=(*facts, last),
    )  # fmt: skip
