"""A rank's share of a model in tensor parallelism, derived from the letters of the axes. No torch.

A rank has adjacent heads with the key heads that they read, neurons, or channels of every part, as
even as their number permits. Embeddings, norms, routers and the head are whole on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from llmcli.config.attention import AttentionConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.model import Branch, LayerConfig, ModelConfig
from llmcli.graph.block import block_names
from llmcli.graph.graph import Graph, graph
from llmcli.graph.ops import Normalize, Project, Sizes, size
from llmcli.graph.routing import ExpertProject
from llmcli.graph.rows import axes_of

_CUT = {"H", "Hk", "G", "C", "F", "Fe", "Fs"}  # letters of the axes that can be cut
Ranges = tuple[range, ...]
Cuts = Mapping[str, Ranges]  # letter of an axis → the rank's indices


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank has, and what is summed over the ranks.

    `config`: of the rank's decoder. `slices`: parameter → the number of its cut axis (in the
    formula's orientation) and the rank's ranges of it. `sums`: products over a cut axis, to be
    summed over all ranks. `biases`: of these products, to be added by one rank only. `statistics`:
    norms of rows that are cut → the number of adjacent ranks that share a row. `whole`: parts that
    cannot be cut, which every rank computes entirely → why.
    """

    config: ModelConfig
    slices: Mapping[str, tuple[int, Ranges]]
    sums: tuple[str, ...]
    biases: frozenset[str]
    statistics: Mapping[str, int]
    whole: Mapping[str, str]


def share(config: ModelConfig, *, ranks: int, rank: int) -> Share:
    """The share of `rank` (from 0 on) of `ranks`."""
    model, whole = graph(config), dict[str, str]()
    cuts: dict[str, Cuts] = {}  # by part
    letters: dict[str, set[str]] = defaultdict(set)
    for row in model.parameters.values():
        letters[_part(row.name)].update(map(_first, row.axes))

    def local(branch: Branch, name: str, layer: int) -> Branch:
        part: Any = branch.part
        try:
            cuts[name] = _cuts(part, letters[name], model.sizes(layer), ranks, rank)
        except ValueError as why:
            cuts[name], whole[name] = {}, str(why)
        sizes: dict[str, Any] = {}
        for letter, ranges in cuts[name].items():
            field, _, inner = axes_of(part)[letter].partition(".")
            count = sum(map(len, ranges))
            sizes[field] = replace(attrgetter(field)(part), **{inner: count}) if inner else count
        if isinstance(part, AttentionConfig):
            if (slopes := part.scores.slopes) and "H" in cuts[name]:
                sizes["slopes"] = tuple(slopes[head] for head in chain(*cuts[name]["H"]))
            return replace(branch, part=part.changed(**sizes))
        return replace(branch, part=replace(part, **sizes))

    def local_layer(layer: LayerConfig, number: int) -> LayerConfig:
        found = [
            tuple(local(one.config, one.part, number) for one in sublayer.branches)
            for sublayer in block_names(layer, f"blocks.{number}")
        ]
        return replace(layer, sublayers=tuple(found))

    layers = tuple(local_layer(layer, number) for number, layer in enumerate(config.layers))
    slices: dict[str, tuple[int, Ranges]] = {}
    for row in model.parameters.values():
        for at, axis in enumerate(row.axes):
            if ranges := _ranges(model, axis, row.layer, cuts.get(_part(row.name), {})):
                slices.setdefault(row.name, (at, ranges))
    summed = {
        node.name: node.op.bias
        for node in model.nodes.values()
        if isinstance(node.op, Project | ExpertProject)
        and _first(node.op.over) in cuts.get(_part(node.op.weight), {})
    }
    statistics = {
        node.name: ranks // node.op.groups
        for node in model.nodes.values()
        if isinstance(node.op, Normalize)
        and node.op.joined
        and node.op.groups < ranks
        and node.axes[0] in cuts[_part(node.name)]
    }
    return Share(
        config=replace(config, layers=layers),
        slices=slices,
        sums=tuple(summed),
        biases=frozenset(filter(None, summed.values())),
        statistics=statistics,
        whole=whole,
    )


def _cuts(part: object, letters: Set[str], sizes: Sizes, ranks: int, rank: int) -> Cuts:
    """The rank's heads, neurons or channels of a part whose parameters have axes of `letters`.

    Raises ValueError if there are too few of them.
    """
    cut, found = _CUT & axes_of(part).keys(), dict[str, Ranges]()
    if not cut:
        raise ValueError("it has no heads, neurons or channels")
    for letter in letters & cut - {"H", "Hk", "G"}:  # any division of these is possible
        if sizes[letter] < ranks:
            raise ValueError(f"{letter} = {sizes[letter]} is less than {ranks} ranks")
        found[letter] = (_even(sizes[letter], ranks, rank),)
    if "H" not in cut:
        return found
    read = next((one for one in ("Hk", "G") if one in cut), "H")  # of which a group reads one
    heads, keys = sizes["H"], sizes[read]
    if heads < ranks:
        raise ValueError(f"H = {heads} is less than {ranks} ranks")
    if keys < ranks and ranks % keys:
        raise ValueError(f"{read} = {keys} is less than {ranks} ranks and does not divide them")
    together = max(1, ranks // keys)  # ranks that have the same one
    own = _even(keys, ranks // together, rank // together)
    group, some = heads // keys, _even(heads // keys, together, rank % together)
    if isinstance(part, DeltaConfig) and part.tiled:
        of = [range(n * keys + own.start, n * keys + own.stop) for n in some]
    else:
        of = [range(own[0] * group + some.start, own[-1] * group + some.stop)]
    return {read: (own,), "H": tuple(of)}


def _even(count: int, ranks: int, rank: int) -> range:
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def _ranges(model: Graph, axis: str, layer: int | None, cuts: Cuts) -> Ranges:
    """The rank's ranges of an axis or of its segments; none if it is whole."""
    sizes, found, start = model.sizes(layer), list[range](), 0
    segments = model.segments(layer).get(axis, axis).split("|")
    if cuts.keys().isdisjoint(map(_first, segments)):
        return ()
    for segment in segments:
        letter, count = _first(segment), size(segment, sizes)
        each = count // sizes[letter]
        for one in cuts.get(letter, (range(sizes[letter]),)):
            found.append(range(start + one.start * each, start + one.stop * each))
        start += count
    return tuple(found)


def _first(axis: str) -> str:
    return axis.partition("·")[0]


def _part(name: str) -> str:
    """`blocks.3.attn` of `blocks.3.attn.W_q`."""
    return ".".join(name.split(".")[:3])
