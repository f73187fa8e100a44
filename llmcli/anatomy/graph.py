"""A whole model as a graph of named tensors, assembled from the rows of its parts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from llmcli.config import LayerConfig, ModelConfig
from llmcli.graph.node import Absent, Node, Parameter, PartGraph, Site, State
from llmcli.graph.ops import Add, Score
from llmcli.parts.embedding.graph import embedding_graph, head_graph
from llmcli.parts.norm.graph import norm_graph
from llmcli.parts.registry import part_of

Place = tuple[str, int | None]  # a group of activations and its layer, None outside of the layers

_ABSENT = (
    Absent(names=r"ln[12]_post\b", why="no norm follows its attention or feed-forward"),
    Absent(names=r"ln[12]\.b$", why="it has no such bias"),
)


class Graph:
    """Every tensor of a model: activations in execution order, parameters, states."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.nodes: dict[str, Node] = {}
        self.parameters: dict[str, Parameter] = {}
        self.states: dict[str, State] = {}
        whole = {"D": config.width, "V": config.vocab, "1": 1}
        self._sizes: dict[int | None, dict[str, int]] = {None: whole}
        self._documents: dict[int | None, dict[str, str]] = {None: {}}
        self.absent: dict[int | None, list[Absent]] = {}
        self._build()

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
        """Where `timing` counts an activation or a parameter: a group of `PARTS`, and the layer.

        What comes before the blocks is in no layer, though it ends in the first one's `resid_pre`.
        Raises KeyError.
        """
        makes = self.parameters[name].makes if name in self.parameters else name
        node = self.nodes[makes]
        return node.group, None if node.group == "embed" else node.layer

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
        for i, layer in enumerate(config.layers):
            stream = self._block(layer, i, enters, stream)
            block = f"blocks.{i}"
            enters = Add(
                parts=(f"{block}.mlp_out", f"{block}.resid_mid"), before=stream,
                also=f"H of block {i}",
            )  # fmt: skip
        last = f"blocks.{len(config.layers) - 1}.resid_post" if config.layers else "embed"
        words = ("the final norm", "the last residual stream, normalized, as it enters the head",
                 ", H of the last block")  # fmt: skip
        final = norm_graph(
            config.final_norm, "ln_final", last, "H′", words, layer=None,
            theirs=("unembed.hook_in",),
        )  # fmt: skip
        self._add(final, None)
        self._add(head_graph(config.head, "ln_final.out"), None)

    def _block(
        self, layer: LayerConfig, i: int, enters: Add, stream: tuple[str, ...]
    ) -> tuple[str, ...]:
        """One block, and what the stream is made of after it."""
        b, width = f"blocks.{i}", self.config.width
        learned = self.config.embedding.positions is not None
        added = (f"{b}.attn_out", f"{b}.mlp_out")
        sources = (f"{b}.ln1.out", f"{b}.ln2.out")
        mixer, ffn = (
            part_of(part).graph(part, Site(
                block=b, source=source, adds=adds, added=letter, layer=i, width=width,
                learned_positions=learned,
            ))
            for part, source, adds, letter in zip(
                (layer.mixer, layer.ffn), sources, added, ("T²", "T⁵"), strict=True
            )
        )  # fmt: skip

        def residual(
            leaf: str, letter: str, op: Add, words: str, group: str, *theirs: str,
            shares: str | None = None,
        ) -> PartGraph:
            node = Node(
                name=f"{b}.{leaf}", letter=letter, axes=("T", "D"), op=op, group=group, layer=i,
                words=f"the residual stream {words}", wide=True, shares=shares, theirs=theirs,
            )  # fmt: skip
            return PartGraph(nodes=(node,))

        def norm(leaf: str, part: PartGraph, what: str, letter: str, source: str) -> PartGraph:
            words = (f"the norm before {what}",
                     f"the residual stream, normalized, as it enters {what}", "")  # fmt: skip
            own = layer.ln1 if leaf == "ln1" else layer.ln2
            return norm_graph(
                own, f"{b}.{leaf}", source, letter, words, layer=i, theirs=part.entering
            )

        copied = enters.parts[0] if i == 0 and len(enters.parts) == 1 else None
        copied = f"blocks.{i - 1}.resid_post" if i else copied
        pre, mid = f"{b}.resid_pre", f"{b}.resid_mid"
        parts = (
            residual("resid_pre", "X", enters, "as it enters the block", "gaps" if i else "embed",
                     "hook_resid_pre", "hook_in", "ln1.hook_in", shares=copied),
            norm("ln1", mixer, "attention", "T¹", pre),
            mixer,
            residual("resid_mid", "T³",
                     Add(parts=(added[0], pre), before=(*stream, added[0])), "after attention",
                     "residual", "hook_resid_mid", "ln2.hook_in"),
            norm("ln2", ffn, "the feed-forward", "T⁴", mid),
            ffn,
            residual("resid_post", "H",
                     Add(parts=(added[1], mid), before=(*stream, *added)),
                     "as it leaves the block", "residual", "hook_resid_post", "hook_out"),
        )  # fmt: skip
        for part in parts:
            self._add(part, i)
        self.absent[i] += _ABSENT
        return (*stream, *added)

    def _add(self, part: PartGraph, layer: int | None) -> None:
        whole = self._sizes[None]
        self.nodes |= {node.name: node for node in part.nodes}
        self.parameters |= {parameter.name: parameter for parameter in part.parameters}
        self.states |= {state.name: state for state in part.states}
        self._sizes.setdefault(layer, dict(whole)).update(part.sizes)
        self._documents.setdefault(layer, {}).update(part.documents)
        self.absent.setdefault(layer, []).extend(part.absent)


@lru_cache(maxsize=64)
def graph(config: ModelConfig) -> Graph:
    """The graph of a model; the same object for equal configurations."""
    return Graph(config)

