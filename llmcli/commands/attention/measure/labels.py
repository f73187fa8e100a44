"""Kinds of heads, told by one metric each, where a prompt is long enough to tell them.

Axes: t rows, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import torch

from llmcli.commands.attention.measure.metrics import RowMeans
from llmcli.commands.attention.report.heads import Label
from llmcli.observe.attention.block import CELLS, Block, Tokens

_ARENA = "a convention (ARENA's course): no theory sets it"
_OURS = "llmcli's own choice"

LABELS: tuple[Label, ...] = (
    Label(name="previous-token", letter="p", metric="previous_token", threshold=0.4, source=_ARENA),
    Label(name="induction", letter="i", metric="induction", threshold=0.4, source=_ARENA),
    Label(name="duplicate", letter="d", metric="duplicate", threshold=0.4, source=_ARENA),
    Label(
        name="sink",
        letter="s",
        metric="sink",
        threshold=0.3,
        source="ε of Gu et al. 2025 (arXiv 2410.10781), who have 64 tokens and count row 0",
    ),
    Label(name="local", letter="l", metric="locality_8", threshold=0.9, source=_OURS),
    Label(name="broad", letter="b", metric="normalized_entropy", threshold=0.8, source=_OURS),
)
EVEN = "broad"  # the kind of a head that looks at all keys alike

FEWEST = 4  # rows that count: the mean of fewer says little of a head


def labels_of(metrics: Mapping[str, float], untold: Container[str] = ()) -> tuple[str, ...]:
    """The kinds of a head with those metrics; one that is NaN tells none, nor do the `untold`."""
    return tuple(
        label.name
        for label in LABELS
        if label.name not in untold
        and not math.isnan(metrics[label.metric])
        and metrics[label.metric] >= label.threshold
    )


def untold_kinds(
    tokens: Tokens, count: int, window: int | None, *, signed: bool = False
) -> dict[str, str]:
    """The kinds that `count` tokens cannot tell in a layer with that window, and why.

    Of `signed` weights none is told by the entropy: they are no distribution.

    Either fewer than `FEWEST` rows count, or a head that looks at all the keys that it sees alike
    would be called so, too: at the first token of 4, the previous one of a window of 2.
    """
    means = RowMeans(tuple(label.metric for label in LABELS), 1)
    rows = max(1, CELLS // count)
    for first in range(0, count, rows):
        means.add(_even(tokens, first, min(rows, count - first), window), slice(0, 1))
    (even,), counted = means.means(), means.rows()
    found = {}
    for label in LABELS:
        number = counted[label.metric]
        if number < FEWEST:
            rows_count = {0: "no row counts", 1: "only 1 row counts"}
            found[label.name] = rows_count.get(number, f"only {number} rows count")
        elif label.name == EVEN and signed:
            found[label.name] = "weights with signs are no distribution, whose entropy tells it"
        elif label.name != EVEN and even[label.metric] >= label.threshold:
            found[label.name] = f"equal weights would give {even[label.metric]:.2f}"
    return found


def _even(tokens: Tokens, first: int, rows: int, window: int | None) -> Block:
    """Rows of a head that looks at all the keys that it sees alike."""
    device = tokens.ids_N.device
    low = 0 if window is None else max(0, first - window)
    at_t1 = torch.arange(first, first + rows, device=device)[:, None]
    keys_S = torch.arange(low, first + rows, device=device)
    seen_t1 = (at_t1 + 1).clamp_max(first + rows if window is None else window)
    visible_tS = (keys_S <= at_t1) & (keys_S > at_t1 - seen_t1)
    return Block((visible_tS / seen_t1)[None], first, low, seen_t1[:, 0], tokens)
