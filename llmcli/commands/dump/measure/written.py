"""What the kernel wrote, and the tensors that are dumped of it: whole, derived, or from the cache.

Axes: B batch (1), H heads, K key/value heads, T rows, S keys, d size of a query and key, e of a
value, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
from torch import Tensor

from llmcli.anatomy.graph import graph
from llmcli.commands.dump.report import DumpedTensor, DumpPlan
from llmcli.graph.ops import HeadShare, size
from llmcli.inspect.cache import cache_check, filled, remembered
from llmcli.inspect.kernel import mixer_of
from llmcli.inspect.layer_map import LayerMap
from llmcli.inspect.parts import AT_ONCE, in_rows, parts
from llmcli.inspect.recurrence import walk
from llmcli.inspect.statistics import Statistics
from llmcli.model import Model
from llmcli.nn.recurrent import Recurrent
from llmcli.nn.state import State
from llmcli.ops.recurrence import Map
from llmcli.records.checks import ViewCheck


class Written:
    """`kept` are activations `[B, …]` by name, `state` the cache where there is one."""

    def __init__(self, model: Model) -> None:
        self._model, self._graph = model, graph(model.config)
        self.kept: dict[str, Tensor] = {}
        self.state: State | None = None

    def numbers(self, one: DumpPlan, tokens: int) -> tuple[tuple[int, ...], Iterator[Tensor]]:
        """The shape without a batch axis, for so many tokens, and the numbers in parts."""
        if one.kind == "parameter":
            return one.shape, self._parameter(one.name)
        elif one.kind == "state":
            whole = self._cached(one.name, tokens)
        elif not self._graph.written(one.name):
            return self._derived(one.name, tokens)
        else:
            whole = self.kept[one.name][0]
        return tuple(whole.shape), parts(whole)

    def _parameter(self, name: str) -> Iterator[Tensor]:
        """Of a table that is kept in blocks no more than a part is dequantized at a time."""
        weight = self._model.decoder.weight(name)
        if self._graph.parameters[name].turned:
            return parts(weight.dense().mT)
        rows = max(1, AT_ONCE * weight.shape[0] // weight.count)
        firsts = range(0, weight.shape[0], rows)
        return (weight.dense(rows=slice(first, first + rows)) for first in firsts)

    def _derived(self, name: str, tokens: int) -> tuple[tuple[int, ...], Iterator[Tensor]]:
        """What the kernel never writes, head by head."""
        mixer = mixer_of(self._model, name)
        emitted = {one: self.kept[one] for one in self._graph.sources(name)}
        node = self._graph[name]
        sizes = self._graph.sizes(node.layer)
        heads = sizes["H"]
        maps: dict[int, Map] = {}  # of the head whose rows are asked for, one after the other

        def rows(head: int, first: int, stop: int) -> Tensor:
            only = slice(head, head + 1)
            if isinstance(mixer, Recurrent) and name.endswith(".pattern"):
                if head not in maps:
                    maps.clear()
                    maps[head] = mixer.map(emitted, only)
                return maps[head].rows(first, stop)[0, 0]
            return mixer.derive(name, emitted, first, stop, heads=only)[0, 0]

        if isinstance(node.op, HeadShare):
            width = self._model.config.width
            # several heads at a time, for every call dequantizes the matrix
            most = max(1, AT_ONCE // (tokens * width))
            whole = (
                mixer.derive(name, emitted, 0, tokens, heads=slice(head, head + most))[0]
                for head in range(0, heads, most)
            )
            return (heads, tokens, width), chain.from_iterable(map(parts, whole))
        shape = (heads, tokens, size(node.axes[-1], {**sizes, "S": tokens}))
        return shape, in_rows(rows, shape)

    def _cached(self, name: str, tokens: int) -> Tensor:
        """Keys or values of all tokens; as they were written where the run gave no cache back."""
        state = self._graph.states[name]
        if self.state is not None:
            return filled(state, self.state.tensors()[name][0], tokens)
        if self._graph.written(state.holds):
            return remembered(self._graph, state, self.kept[state.holds][0])
        emitted = {one: self.kept[one] for one in self._graph.sources(state.holds)}
        mixer = mixer_of(self._model, state.holds)
        return mixer.derive(state.holds, emitted, tokens - 1, tokens)[0, :, 0]

    def compare_cache(self, one: DumpPlan, tokens: int) -> ViewCheck:
        """Counts the numbers in the cache that are not those that were put there.

        Of the state of a recurrence, which no kernel gives out: that the tokens lead to it.
        """
        state, cached = self._graph.states[one.name], self._cached(one.name, tokens)
        if self._graph.written(state.holds):
            theirs = remembered(self._graph, state, self.kept[state.holds][0])
            return cache_check(theirs, cached, one.name)
        of = LayerMap(self._model, state.layer)
        seen = {name: self.kept[name][0] for name in of.recurrence_reads}
        return walk(of.recurrence(seen)).check(cached, one.name)


def summary(one: DumpPlan, shape: tuple[int, ...], found: Statistics) -> DumpedTensor:
    """What `found` says of a tensor of that shape."""
    bad = found.first_bad
    return DumpedTensor(
        name=one.name,
        kind=one.kind,
        axes=one.axes,
        shape=shape,
        dtype=one.dtype,
        formula=one.formula,
        mean=found.mean,
        std=found.std,
        low=found.low,
        high=found.high,
        norm=found.norm,
        masked=found.masked,
        nan=found.nan,
        infinite=found.infinite,
        first_bad=None if bad is None else tuple(int(i) for i in np.unravel_index(bad, shape)),
    )


def first_bad(tensor: DumpedTensor) -> str:
    """Which number is the first that is not finite, empty where all are."""
    if tensor.first_bad is None:
        return ""
    kind = "not a number" if not tensor.infinite else "infinite" if not tensor.nan else "not finite"
    return f"`{tensor.name}[{','.join(map(str, tensor.first_bad))}]` is {kind}"
