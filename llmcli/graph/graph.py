"""A model as a graph of named tensors, assembled from its parts. No torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache

from llmcli.config.model import ModelConfig
from llmcli.graph.block import BlockRows
from llmcli.graph.node import Kernel, Node, Parameter, PartGraph, State
from llmcli.graph.ops import Add, Mix, Project, Score, Softmax, size
from llmcli.graph.parts.embedding import embedding_graph, head_graph
from llmcli.graph.parts.norm import norm_graph
from llmcli.graph.parts.ple import layer_embedding_graph

Place = tuple[str, int | None]  # a group of activations and its layer (None: outside)


class Graph:
    """Every tensor of a model: activations in execution order, parameters, states.

    `cached`: activations kept in the dtype of keys and values. `wide_products`: fused products with
    a result in at least float32.

    Raises ValueError if two mixers of a layer use the same state name.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.nodes: dict[str, Node] = {}
        self.parameters: dict[str, Parameter] = {}
        self.states: dict[str, State] = {}
        self.kernels: list[Kernel] = []
        self.returns: dict[str, str] = {}  # activation → the last one of its part
        whole = {"D": config.width, "V": config.vocab, "1": 1}
        self._sizes: dict[int | None, dict[str, int]] = {None: whole}
        self._documents: dict[int | None, dict[str, str]] = {None: {}}
        self._segments: dict[int | None, dict[str, str]] = {}
        self._build()
        nodes = self.nodes.values()
        self._tap_only = frozenset(node.name for node in nodes if node.op.tap_only)
        self._derived = self.derived(edited=())
        self._formulas: dict[str, str] = {}
        self.cached = {state.holds for state in self.states.values() if state.cached}
        wide = (node.op for node in nodes if node.wide)
        self.wide_products = {op.fused for op in wide if isinstance(op, Project)}

    def __contains__(self, name: str | None) -> bool:
        return name in self.nodes

    def __getitem__(self, name: str) -> Node:
        """The activation `name`. Raises KeyError."""
        return self.nodes[name]

    def letter(self, name: str) -> str:
        """The symbol of an activation or a parameter in formulas (also of a tied `head.W`)."""
        if name in self.nodes:
            return self.nodes[name].letter
        return "W_head" if name == "head.W" else self.parameters[name].letter

    def formula(self, node: Node) -> str:
        """The formula, such as `Q = T¹ W_q + b_q`."""
        if node.name not in self._formulas:
            own = node.formula_letter or node.letter
            self._formulas[node.name] = node.op.formula(own, self.letter)
        return self._formulas[node.name]

    def words(self, name: str) -> str:
        """The description of a tensor. Raises KeyError."""
        row = self.nodes.get(name) or self.parameters.get(name) or self.states[name]
        return row.words

    def place(self, name: str) -> Place:
        """The group and layer in which `timing` counts an activation or a parameter.

        Activations before the blocks have no layer, including the first `resid_pre`. Raises
        KeyError.
        """
        output = self.parameters[name].output if name in self.parameters else name
        node = self.nodes[output]
        return node.group, None if node.group == "embed" else node.layer

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The groups of `timing` in execution order, without `gaps`.

        Norms come first and sums into the stream last, although blocks interleave them. A group of
        some layers only is placed before the group that follows it there.
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
        """Index of the first of the last layers without a state, which share earlier layers' state.

        In prefill these only process tokens with requested logits.
        """
        return 1 + max(state.layer for state in self.states.values())

    def sizes(self, layer: int | None) -> Mapping[str, int]:
        """Letter of an axis → size: of the model, plus those of `layer` if given."""
        return self._sizes[layer]

    def segments(self, layer: int | None) -> Mapping[str, str]:
        """Letter of an axis → the axes concatenated in it, such as `Hk·dk|Hk·dk|H·dv`."""
        return self._segments.get(layer, {})

    def documents(self, layer: int | None) -> Mapping[str, str]:
        """The documents' notation of letters specific to a part."""
        return self._documents[layer]

    def _build(self) -> None:
        config = self.config
        self._add(embedding_graph(config.embedding), None)
        stream = config.embedding.residual_updates
        enters = Add(parts=stream, before=stream)
        copied = stream[0] if len(stream) == 1 else None
        if config.embedding.per_layer is not None:
            self._add(layer_embedding_graph(config.embedding), None)
        for i, layer in enumerate(config.layers):
            rows, stream = BlockRows(layer, i, config.width).rows(enters, copied)
            for part in rows:
                self._add(part, i)
            copied = f"blocks.{i}.resid_post"
            left = self.nodes[copied].op
            assert isinstance(left, Add)
            enters = replace(left, before=stream, also=f"H of block {i}")
        last = f"blocks.{len(config.layers) - 1}.resid_post" if config.layers else stream[0]
        words = ("the final norm", "the last residual stream, normalized, as it enters the head")
        final = norm_graph(config.final_norm, "ln_final", "H′", last, words, layer=None)
        scale, out = final.nodes
        out = replace(out, aside=", H of the last block")
        self._add(replace(final, nodes=(scale, out)), None)
        self._add(head_graph(config.head, "ln_final.out", config.embedding.size), None)

    def derived(self, edited: Container[str]) -> frozenset[str]:
        """Activations that no kernel stores if `edited` are edited; computed only for display."""
        return self._tap_only.union(*(one.fuses for one in self.kernels if one.runs(edited)))

    def written(self, name: str) -> bool:
        """Whether a kernel stores an activation (without edits)."""
        return name not in self._derived

    def sources(self, name: str) -> tuple[str, ...]:
        """The stored activations from which the derived activation `name` is computed."""
        found: dict[str, None] = {}
        for source in self.nodes[name].op.inputs:
            found |= dict.fromkeys((source,) if self.written(source) else self.sources(source))
        return tuple(found)

    def after(self, state: State) -> str:
        """The first stored activation after the state's update."""
        names = list(self.nodes)
        behind = names[names.index(state.before) :]
        return next(name for name in behind if self.written(name))

    @cached_property
    def mixers(self) -> dict[int, Node]:
        """The nodes that mix a layer's values by a map `[H, T, S]` (`op.pattern`), by layer."""
        found: dict[int, Node] = {}
        for node in self.nodes.values():
            if node.layer is not None and isinstance(node.op, Mix):
                found.setdefault(node.layer, node)
        return found

    def score(self, mix: Mix) -> Score | None:
        """The scores of a softmax map; None for other maps."""
        softmax = self.nodes[mix.pattern].op
        score = self.nodes[softmax.source].op if isinstance(softmax, Softmax) else None
        return score if isinstance(score, Score) else None

    def _add(self, part: PartGraph, layer: int | None) -> None:
        whole = self._sizes[None]
        self.nodes |= {node.name: node for node in part.nodes}
        self.returns |= {node.name: part.nodes[-1].name for node in part.nodes}
        self.parameters |= {parameter.name: parameter for parameter in part.parameters}
        for state in part.states:
            other = self.states.setdefault(state.name, state)
            if other is not state:
                raise ValueError(f"`{other.holds}` and `{state.holds}` are both `{state.name}`")
        self.kernels += part.kernels
        sizes = self._sizes.setdefault(layer, dict(whole))
        joined = {letter: size(axis, part.sizes) for letter, axis in part.segments.items()}
        for letter, count in {**part.sizes, **joined}.items():
            if sizes.setdefault(letter, count) != count:
                raise ValueError(f"layer {layer}: `{letter}` is {sizes[letter]} and {count}")
        self._segments.setdefault(layer, {}).update(part.segments)
        self._documents.setdefault(layer, {}).update(part.documents)


@lru_cache(maxsize=64)
def graph(config: ModelConfig) -> Graph:
    """The graph of a model; the same object for equal configurations."""
    return Graph(config)
