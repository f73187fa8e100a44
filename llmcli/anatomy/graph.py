"""A whole model as a graph of named tensors, assembled from the rows of its parts. No torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache

from llmcli.anatomy.block import block_rows
from llmcli.config import ModelConfig
from llmcli.graph.node import Absent, Kernel, Node, Parameter, PartGraph, State
from llmcli.graph.ops import Add, Mix, Score, Softmax
from llmcli.parts.embedding.graph import embedding_graph, head_graph
from llmcli.parts.norm.graph import norm_graph
from llmcli.parts.ple.graph import layer_embedding_graph

Place = tuple[str, int | None]  # a group of activations and its layer, None outside of the layers


class Graph:
    """Every tensor of a model: activations in execution order, parameters, states.

    Raises ValueError where two mixers of a layer call what they keep the same.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.nodes: dict[str, Node] = {}
        self.parameters: dict[str, Parameter] = {}
        self.states: dict[str, State] = {}
        self.kernels: list[Kernel] = []
        whole = {"D": config.width, "V": config.vocab, "1": 1}
        self._sizes: dict[int | None, dict[str, int]] = {None: whole}
        self._documents: dict[int | None, dict[str, str]] = {None: {}}
        self.absent: dict[int | None, list[Absent]] = {}
        self.similar: dict[int | None, list[tuple[str, tuple[str, ...]]]] = {}
        self._build()
        self._derived = self.derived(edited=())

    def __contains__(self, name: str | None) -> bool:
        return name in self.nodes

    def __getitem__(self, name: str) -> Node:
        """The activation of that name. Raises KeyError."""
        return self.nodes[name]

    def letter(self, name: str) -> str:
        """How formulas write an activation or a parameter (`head.W` also where it is tied)."""
        if name in self.nodes:
            return self.nodes[name].letter
        return "W_head" if name == "head.W" else self.parameters[name].letter

    def formula(self, node: Node) -> str:
        """`Q = T¹ W_q + b_q`."""
        return node.op.formula(node.formula_letter or node.letter, self.letter)

    def words(self, name: str) -> str:
        """What it is, in a few words. Raises KeyError."""
        row = self.nodes.get(name) or self.parameters.get(name) or self.states[name]
        return row.words

    def place(self, name: str) -> Place:
        """Where `timing` counts an activation or a parameter: one of `groups`, and the layer.

        What comes before the blocks is in no layer, though it ends in the first one's `resid_pre`.
        Raises KeyError.
        """
        makes = self.parameters[name].makes if name in self.parameters else name
        node = self.nodes[makes]
        return node.group, None if node.group == "embed" else node.layer

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Where `timing` counts activations, in the order of execution; without `gaps`.

        Norms come before and between a block's parts, sums into the stream between and behind them:
        here they are first and last. A group of some layers alone stands before what follows there.
        """
        places: dict[int | None, dict[str, None]] = {layer: {} for layer in self._sizes}
        for name in self.nodes:
            group, layer = self.place(name)
            places[layer][group] = None
        outside, found = list(places.pop(None)), list[str]()
        inside = (
            sorted(own, key=lambda group: (group == "residual") - (group == "norm"))
            for own in places.values()
        )
        for own in (*inside, outside):
            at = len(found)
            for group in reversed(own):
                if group in found:
                    at = found.index(group)
                else:
                    found.insert(at, group)
        return tuple(group for group in found if group != "gaps")

    @cached_property
    def readers(self) -> int:
        """The first of the last layers that keep nothing: they read what layers before them keep.

        Of a prompt they need compute only the tokens whose logits are asked for.
        """
        return 1 + max(state.layer for state in self.states.values())

    def sizes(self, layer: int | None) -> Mapping[str, int]:
        """Letter of an axis → size: of the whole model, and of that layer where one is given."""
        return self._sizes[layer]

    def documents(self, layer: int | None) -> Mapping[str, str]:
        """How the documents write the letters that are a part's own."""
        return self._documents[layer]

    def entering(self, layer: int) -> tuple[str, str]:
        """The queries and keys of a layer as they enter the scores: rotated, normalized or plain.

        Raises KeyError where that layer has no scores.
        """
        op = self.nodes[f"blocks.{layer}.attn.scores"].op
        if not isinstance(op, Score):
            raise KeyError(layer)
        return op.query, op.key

    def _build(self) -> None:
        config = self.config
        ends = embedding_graph(config.embedding)
        self._add(ends, None)
        stream = tuple(ends_node.name for ends_node in ends.nodes)
        enters = Add(parts=stream, before=stream)
        copied = stream[0] if len(stream) == 1 else None
        if config.embedding.per_layer is not None:
            self._add(layer_embedding_graph(config.embedding), None)
        learned = config.embedding.positions is not None
        for i, layer in enumerate(config.layers):
            rows, stream = block_rows(
                layer, i, width=config.width, learned_positions=learned, enters=enters,
                copied=copied,
            )  # fmt: skip
            for part in rows:
                self._add(part, i)
            copied = f"blocks.{i}.resid_post"
            left = self.nodes[copied].op
            assert isinstance(left, Add)
            enters = replace(left, before=stream, also=f"H of block {i}")
        last = f"blocks.{len(config.layers) - 1}.resid_post" if config.layers else "embed"
        words = ("the final norm", "the last residual stream, normalized, as it enters the head",
                 ", H of the last block")  # fmt: skip
        final = norm_graph(
            config.final_norm, "ln_final", last, "H′", words, layer=None,
            theirs=("unembed.hook_in",),
        )  # fmt: skip
        theirs = r"(norm|ln_f|final_norm)(\.weight)?"
        self._add(replace(final, similar=((theirs, ("ln_final.out", "ln_final.w")),)), None)
        self._add(head_graph(config.head, "ln_final.out"), None)

    def derived(self, edited: Container[str]) -> frozenset[str]:
        """What no kernel writes where those activations are edited: it is computed to be shown."""
        covered = (one.covers for one in self.kernels if one.runs(edited))
        shown = (name for name, node in self.nodes.items() if node.op.only_shown)
        return frozenset(shown).union(*covered)

    def written(self, name: str) -> bool:
        """Whether an activation is written by a kernel where nothing is edited."""
        return name not in self._derived

    def sources(self, name: str) -> tuple[str, ...]:
        """What a kernel writes and `name`, which it does not, is computed from."""
        found: dict[str, None] = {}
        for source in self.nodes[name].op.inputs:
            found |= dict.fromkeys((source,) if self.written(source) else self.sources(source))
        return tuple(found)

    def after(self, state: State) -> str:
        """The first activation that a kernel writes when the state already holds the new rows."""
        names = list(self.nodes)
        behind = names[names.index(state.before) :]
        return next(name for name in behind if self.written(name))

    def mixing(self, layer: int) -> Node | None:
        """What mixes the layer's values by a map `[H, T, S]` (`op.pattern`); None without one."""
        inside = (node for node in self.nodes.values() if node.layer == layer)
        return next((node for node in inside if isinstance(node.op, Mix)), None)

    def score(self, mix: Mix) -> Score | None:
        """The scores that the map of `mix` is the softmax of; None where it is no such map."""
        softmax = self.nodes[mix.pattern].op
        score = self.nodes[softmax.source].op if isinstance(softmax, Softmax) else None
        return score if isinstance(score, Score) else None

    def _add(self, part: PartGraph, layer: int | None) -> None:
        whole = self._sizes[None]
        self.nodes |= {node.name: node for node in part.nodes}
        self.parameters |= {parameter.name: parameter for parameter in part.parameters}
        for state in part.states:
            other = self.states.setdefault(state.name, state)
            if other is not state:
                raise ValueError(f"`{other.holds}` and `{state.holds}` are both `{state.name}`")
        self.kernels += part.kernels
        sizes = self._sizes.setdefault(layer, dict(whole))
        for letter, size in part.sizes.items():
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"layer {layer}: `{letter}` is {sizes[letter]} and {size}")
        self._documents.setdefault(layer, {}).update(part.documents)
        self.absent.setdefault(layer, []).extend(part.absent)
        self.similar.setdefault(layer, []).extend(part.similar)


@lru_cache(maxsize=64)
def graph(config: ModelConfig) -> Graph:
    """The graph of a model; the same object for equal configurations."""
    return Graph(config)
