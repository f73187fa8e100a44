"""Whether a cache holds what was put there.

Axes: K key/value heads, S positions, d size of a head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from llmcli.anatomy.graph import Graph
from llmcli.graph.node import State
from llmcli.records.document import ViewCheck


def filled(state: State, cached: Tensor, tokens: int) -> Tensor:
    """The slots of a state's tensor, without a batch axis, that `tokens` tokens fill, or all."""
    return cached.narrow(state.axes.index("S"), 0, tokens) if "S" in state.axes else cached


def remembered(model: Graph, state: State, rows: Tensor) -> Tensor:
    """What a state holds of all `rows` of its activation, `[…, T, …]` without a batch axis.

    Axes that are not the activation's are tokens: `S` all of them, another letter that many of the
    last ones, with zeros before the first; without any it is the last one alone. In a ring each is
    in the slot of its position.
    """
    at = model[state.holds].axes.index("T")
    tokens = [axis for axis in state.axes if axis not in model[state.holds].axes]
    if tokens == ["S"]:
        return rows
    wanted = model.sizes(state.layer)[tokens[0]] if tokens else 1
    there = min(wanted, rows.shape[at])
    last = rows.narrow(at, rows.shape[at] - there, there)
    behind = 2 * (rows.ndim - 1 - at)
    last = F.pad(last, (*[0] * behind, wanted - there, 0))
    if state.ring:
        last = last.roll(rows.shape[at] % wanted, at)
    return last if tokens else last.squeeze(at)


def cache_check(emitted_KSd: Tensor, cached_KSd: Tensor, name: str) -> ViewCheck:
    """Counts the numbers of the cache called `name` that are not those that were computed.

    Bit for bit, except that any NaN equals any other.
    """
    equal_KSd = (emitted_KSd == cached_KSd) | (emitted_KSd.isnan() & cached_KSd.isnan())
    wrong = (~equal_KSd).nonzero().tolist()
    where = f"{name}[{','.join(map(str, wrong[0]))}]" if wrong else ""
    words = "the cache holds the keys and values that were computed"
    return ViewCheck(name="cache", words=words, value=float(len(wrong)), tolerance=0.0, where=where)
