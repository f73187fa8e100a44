"""The attention map of a layer: which activations it is made of, and its rows.

Axes: H heads, K heads of values, t rows (queries), S keys, d size of a query and key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from llmcli.config.attention import Chunk, most_keys
from llmcli.graph.block import block_names
from llmcli.graph.graph import graph
from llmcli.graph.node import State
from llmcli.graph.ops import Convolve, Mix, Softmax
from llmcli.graph.parts.registry import part_of
from llmcli.inspect.formulas import formula_inputs
from llmcli.inspect.kernel import edited, mixer_of
from llmcli.model import Model
from llmcli.nn.recurrent import Recurrent
from llmcli.nn.softmax_map import SoftmaxMap
from llmcli.ops.norm import at_least_float32
from llmcli.ops.recurrence import Inputs


class LayerMap:
    """What the map `[H, T, S]` of layer `number` is made of. Raises KeyError where it has none.

    `value` and `mixed` are the activations that it mixes and gives, `sources` those that it is
    computed from, and `reads` all of these. `residual_update`: what its mixer adds to the residual
    stream. `score`: the operation whose softmax it is, None where it is no such. `sinks`: whether
    its heads have sinks of their own, so that their rows sum to less than 1. `maps`: the pattern
    and its scores. `edited`: whether these or `mixed` are edited, and do not follow from `sources`.

    `whole`: the activations whose rows are all needed for one: keys and values, or what a map or a
    convolution reads. `states`: what a cache has of all tokens: keys and values (which may be those
    of another layer), or what these are computed from; `kept_fixed`: what it has of the mixer in
    a size that no token makes larger.
    """

    def __init__(self, model: Model, number: int) -> None:
        self.model, self.number = model, number
        self._graph = graph(model.config)
        node = self._graph.mixers.get(number)
        if node is None or not isinstance(node.op, Mix):
            raise KeyError(number)
        self.pattern, self.value, self.mixed = node.op.pattern, node.op.value, node.name
        self.window, self.group = node.op.window, node.op.group
        self.signed = node.op.signed
        self.heads = self._graph.sizes(number)["H"]
        self.sources = self._graph.sources(self.pattern)
        self.recurrence_reads = (*self.sources, self.value)
        self.reads = tuple(dict.fromkeys((*self.recurrence_reads, self.mixed)))
        self.score = self._graph.score(node.op)
        self.maps = (self.pattern, *self._graph[self.pattern].op.inputs[: self.score is not None])
        self.edited = not edited(model).isdisjoint((self.mixed, *self.maps))
        above = self._graph[self.pattern].op
        self._sink = above.sink if isinstance(above, Softmax) else None
        self.sinks = self._sink is not None
        self._mixer = mixer_of(model, self.mixed)
        part = self.mixed.rpartition(".")[0]
        block = block_names(model.config.layers[number], f"blocks.{number}")
        branch = next(one for sub in block for one in sub.branches if one.part == part)
        self.residual_update, self._part = branch.residual_update, branch.config.part
        own = [one.op for name, one in self._graph.nodes.items() if name.startswith(f"{part}.")]
        self._convolved = [op for op in own if isinstance(op, Convolve)]
        keys = self.sources if self.score is None else (self.score.key,)
        convolved = (op.source for op in self._convolved)
        self.whole = tuple(dict.fromkeys((*keys, self.value, *convolved)))
        states = self._graph.states.values()
        mine = [one for one in states if one.holds.startswith(f"{part}.")]
        growing = [one for one in states if "S" in one.axes]
        self.states = [one for one in growing if one in mine or one.holds in self.whole]
        self.kept_fixed = [one for one in mine if "S" not in one.axes]

    @property
    def note(self) -> str:
        """What its map is where it is no softmax, in a sentence; empty where it is one."""
        if not self.signed:
            return ""
        words = "the exact equivalent map: its weights are signed, and rows do not sum to 1"
        seen = max((one.length for one in self._convolved), default=1)
        if seen == 1:
            return words
        return f"{words}; values come after a convolution: column j mixes tokens j−{seen - 1} to j"

    @property
    def kind(self) -> str:
        """What such a layer is called: `full`, `window 512`, or what its mixer is."""
        if self.score is not None:
            word = "chunk" if isinstance(self.window, Chunk) else "window"
            return "full" if self.window is None else f"{word} {most_keys(self.window)}"
        kind: str = part_of(self._part).facts(self._part)["kind"]
        return kind

    @cached_property
    def checked(self) -> tuple[str, ...]:
        """Everything from the residual stream to what is added, the map included."""
        names = [node.name for node in self._graph.nodes.values() if node.layer == self.number]
        inside = names[1 : names.index(self.residual_update) + 1]
        on_the_way = {self.pattern, *self._graph[self.pattern].op.inputs}
        return tuple(n for n in inside if self._graph.written(n) or n in on_the_way)

    @cached_property
    def inputs(self) -> frozenset[str]:
        """What the formulas of these are checked with."""
        return formula_inputs(self.model.config, self.checked) | {self.value, self.mixed}

    def held(self, cache: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
        """What a `cache` has of the first `tokens`, by activations, and `whole` as follows from it.

        Where latents are kept and not keys and values, these are computed from them.
        """
        on = self.model.device
        found = {
            one.holds: cache[one.name].narrow(1 + one.axes.index("S"), 0, tokens).to(on)
            for one in self.states
        }
        for name in self.whole if self.score is not None else ():
            if name not in found:
                found[name] = self._mixer.derive(name, found, 0, tokens)
        return found

    @property
    def matrix(self) -> State:
        """What a cache has of the state of a recurrence. Raises ValueError without one."""
        (found,) = (one for one in self.kept_fixed if not self._graph.written(one.holds))
        return found

    def rows(
        self, seen: Mapping[str, Tensor], heads: Sequence[int], queries: slice, keys: slice
    ) -> MapRows:
        """The map of those `heads`, of the `queries` at these positions, and of the `keys`.

        `seen` are activations `[H, T, d]` of all tokens.
        """
        mixer, of = self._mixer, slice(heads[0], heads[-1] + 1)
        if self.score is None:
            emitted = {name: seen[name][None] for name in self.sources}
            map_1HtS = mixer.derive(self.pattern, emitted, queries.start, queries.stop, heads=of)
            scores_HtS = map_1HtS[0, :, :, keys].log()
            return MapRows(scores_HtS.softmax(-1), scores_HtS, None, None)
        q_Htd = at_least_float32(seen[self.score.query][heads, queries])
        groups = slice(heads[0] // self.group, heads[-1] // self.group + 1)
        k_KSd = at_least_float32(seen[self.score.key][groups, keys])
        assert isinstance(mixer, SoftmaxMap)
        first = queries.start - keys.start
        scores_HtS = mixer.score_rows(q_Htd[None], k_KSd[None], first, heads, before=keys.start)[0]
        taken_Ht = None
        if self._sink is not None:
            sink_H = self.model.decoder.weight(self._sink).dense()[list(heads), None].to(k_KSd)
            taken_Ht = (sink_H.to(scores_HtS.dtype) - scores_HtS.logsumexp(-1)).sigmoid()
        factors = [self.score.factor(at) for at in range(queries.start, queries.stop)]
        factors_t = torch.tensor(factors, dtype=q_Htd.dtype, device=q_Htd.device)
        norms = q_Htd.norm(dim=-1) * factors_t.abs(), k_KSd.norm(dim=-1)
        return MapRows(mixer.weights(scores_HtS, heads), scores_HtS, taken_Ht, norms)

    def map(self, seen: Mapping[str, Tensor], heads: Sequence[int]) -> Callable[[slice], Tensor]:
        """A function that computes rows `[H, t, S]` of a `signed` map, fastest in order."""
        one = self._recurrent.map(self._batched(seen), slice(heads[0], heads[-1] + 1))
        return lambda queries: one.rows(queries.start, queries.stop)[0]

    def recurrence(self, seen: Mapping[str, Tensor]) -> Inputs:
        """What the recurrence reads whose map is `signed`; `seen` has all tokens' activations."""
        return self._recurrent.read(self._batched(seen))

    @property
    def _recurrent(self) -> Recurrent:
        assert isinstance(self._mixer, Recurrent)
        return self._mixer

    def _batched(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: seen[name][None] for name in self.recurrence_reads}


class MapRows(NamedTuple):
    """Rows of a map, `[H, t, S]`, and the scores that it is the softmax of, −∞ where masked.

    At least float32. Of a map that is no softmax they are its logarithm. `taken_Ht`: what the
    heads' sinks take of each row; None where they have none. A score's roundings are a share of the
    product of the `norms` of its query and key, `[H, t]` and `[K, S]`; None: of its own size.
    """

    a_HtS: Tensor
    scores_HtS: Tensor
    taken_Ht: Tensor | None
    norms: tuple[Tensor, Tensor] | None
