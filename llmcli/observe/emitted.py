"""Whether the cache holds, bit for bit, the keys and values that the layers gave out.

Axes: H heads of keys and values, T tokens, S slots of the cache, d size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.anatomy.graph import graph
from llmcli.config import ModelConfig
from llmcli.nn.state import State
from llmcli.observe.cache import cache_view, filled, place, remembered
from llmcli.reports.checks import ViewCheck

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Emitted:
    """Watches a run: keeps a fingerprint of 8 bytes of every key and value."""

    def __init__(self, config: ModelConfig) -> None:
        self._graph = graph(config)
        # the state of a recurrence is only shown: `ChunkProof` holds the cache against it
        written = [one for one in self._graph.states.values() if self._graph.written(one.holds)]
        self._states = {state.holds: state.name for state in written}
        self._kept: dict[str, list[Tensor]] = {state.name: [] for state in written}

    def watch(self, first: int, name: str, x_1HTd: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`."""
        if name in self._states:
            self._kept[self._states[name]].append(_fingerprints(x_1HTd[0]))

    def check(self, state: State) -> ViewCheck:
        """Counts the rows in the cache of that run that are not those given out."""
        wrong, where = 0, ""
        for name, cached in state.tensors().items():
            if name not in self._kept:
                continue
            of = self._graph.states[name]
            at = self._graph[of.holds].axes.index("T")
            emitted = torch.cat(self._kept[name], at)
            held = _fingerprints(filled(of, cached[0], emitted.shape[at]))
            found = (remembered(self._graph, of, emitted) != held).nonzero().tolist()
            if found and not wrong:
                where = place(name, found[0])
            wrong += len(found)
        return cache_view(wrong, where)


def _fingerprints(x: Tensor) -> Tensor:
    """`[…, d]` → `[…]` int64: of the bits of each row the sum, modulo 2⁶⁴, with odd factors.

    A row of which one number differs has another sum, since an odd factor has an inverse.
    """
    generator = torch.Generator().manual_seed(0)
    limit = torch.iinfo(torch.int64).max
    factors_d = torch.randint(limit, (x.shape[-1],), generator=generator) | 1
    factors_d = factors_d.to(x.device)
    bits = x.contiguous().view(_BITS[x.element_size()])
    # a head at a time: the products are int64, up to four times as large
    heads = bits if bits.ndim > 2 else bits[None]
    sums = torch.stack([(bits_Td * factors_d).sum(-1) for bits_Td in heads])
    return sums if bits.ndim > 2 else sums[0]
