"""Whether the cache holds, bit for bit, the keys and values that the layers gave out.

Axes: H heads of keys and values, T tokens, S slots of the cache, d size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.anatomy.graph import graph
from llmcli.config import ModelConfig
from llmcli.nn.state import State
from llmcli.reports.checks import ViewCheck

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Emitted:
    """Watches a run: keeps a fingerprint of 8 bytes of every key and value."""

    def __init__(self, config: ModelConfig) -> None:
        states = graph(config).states.values()
        self._states = {state.holds: state.name for state in states}
        self._kept: dict[str, list[Tensor]] = {state.name: [] for state in states}

    def watch(self, first: int, name: str, x_1HTd: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`."""
        if name in self._states:
            self._kept[self._states[name]].append(_fingerprints(x_1HTd[0]))

    def check(self, state: State) -> ViewCheck:
        """Counts the keys and values in the cache of that run that are not those given out."""
        wrong, where = 0, ""
        for name, cached_1HSd in state.tensors().items():
            emitted_HT = torch.cat(self._kept[name], 1)
            cached_HT = _fingerprints(cached_1HSd[0, :, : emitted_HT.shape[1]])
            places = (emitted_HT != cached_HT).nonzero().tolist()
            if places and not wrong:
                where = f"{name}[{','.join(map(str, places[0]))}]"
            wrong += len(places)
        return ViewCheck(
            name="cache",
            words="the cache holds the keys and values that were computed",
            value=float(wrong),
            tolerance=0.0,
            where=where,
        )


def _fingerprints(x_HTd: Tensor) -> Tensor:
    """`[H, T]` int64: of the bits of each row the sum, modulo 2⁶⁴, with odd factors.

    A row of which one number differs has another sum, since an odd factor has an inverse.
    """
    generator = torch.Generator().manual_seed(0)
    limit = torch.iinfo(torch.int64).max
    factors_d = torch.randint(limit, (x_HTd.shape[-1],), generator=generator) | 1
    factors_d = factors_d.to(x_HTd.device)
    bits_HTd = x_HTd.view(_BITS[x_HTd.element_size()])
    # a head at a time: the products are int64, up to four times as large
    return torch.stack([(bits_Td * factors_d).sum(-1) for bits_Td in bits_HTd])
