"""The activations of a pass, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from llmcli.inspect.kernel import layer_of
from llmcli.inspect.layer_map import LayerMap

Seen = dict[str, Tensor]


class LayerWatch:
    """A tap: `settle(of, seen)` is called once for each of `maps`, when its layer is complete.

    `seen` are all of `LayerMap.inputs`, which are then forgotten, but for those that are of another
    layer: keys and values that are lent.
    """

    def __init__(
        self, maps: Mapping[int, LayerMap], settle: Callable[[LayerMap, Seen], None]
    ) -> None:
        self._maps, self._settle = maps, settle
        self._now: Seen = {}
        self._lent: Seen = {}
        self._lenders = {
            name for of in maps.values() for name in of.inputs if layer_of(name) != of.number
        }

    def __call__(self, name: str, tensor: Tensor) -> None:
        """An activation of all tokens."""
        number = layer_of(name)
        if name in self._lenders:
            self._lent[name] = tensor
        if number is None or number not in self._maps:
            return
        of = self._maps[number]
        if name in of.inputs:
            self._now[name] = tensor
        if name == of.adds:
            lent = {one: self._lent[one] for one in of.inputs & self._lenders}
            seen, self._now = lent | self._now, {}
            self._settle(of, seen)
