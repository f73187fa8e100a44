"""Whether the cache holds, bit for bit, the keys and values that the layers gave out.

Axes: H heads of keys and values, T tokens, d size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.anatomy.graph import graph
from llmcli.config import ModelConfig
from llmcli.explain.formulas import worst
from llmcli.measure.cache import cache_check, remembered
from llmcli.measure.observe import Observed
from llmcli.reports.checks import ViewCheck


class Emitted:
    """Watches a run: keeps keys and values of all its tokens, as many bytes as its cache has."""

    def __init__(self, config: ModelConfig) -> None:
        self._graph = graph(config)
        self._states = {state.holds: state.name for state in self._graph.states.values()}
        self._kept: dict[str, list[Tensor]] = {name: [] for name in self._graph.states}

    def watch(self, first: int, name: str, x_1HTd: Tensor) -> None:
        """An activation of the call whose tokens begin at `first`."""
        if name in self._states:  # a copy: a view would keep the whole product of the projection
            self._kept[self._states[name]].append(x_1HTd[0].clone())

    def check(self, run: Observed) -> ViewCheck:
        """The worst difference to the cache of the run; what was kept is given up."""
        if run.state is None:
            raise ValueError("without new tokens there is no cache")
        found = []
        for name, cached in run.state.tensors().items():
            state = self._graph.states[name]
            rows = torch.cat(self._kept.pop(name), self._graph[state.holds].axes.index("T"))
            held = cached[0]
            if "S" in state.axes:
                held = held.narrow(state.axes.index("S"), 0, len(run.ids))
            found.append(cache_check(remembered(self._graph, state, rows), held, name))
        return worst(found)
