"""A number of the model as the sum of what embeddings, heads, feed-forwards and biases add to it.

Direct attribution (Elhage et al. 2021; the direct logit attribution of Nanda et al.): with the
divisors of norms as they were, the way from the residual stream to a logit is linear. The graph is
walked backwards from the number with its gradient g along that way: a sum passes g on to its parts,
a norm divides it, a product turns it. What is no longer linear (a head's result, a hidden layer) is
a term, g times what was added; biases are terms of their own.

Axes: H heads, K chosen experts, D width, V vocabulary, e size of a head's result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llmcli.evaluate.norms import Normalize
from llmcli.evaluate.rule import concatenated, exact
from llmcli.graph import ops
from llmcli.graph.graph import graph
from llmcli.graph.node import Node
from llmcli.graph.routing import ExpertProject, SumExperts
from llmcli.inspect.kernel import Kernel, edited, rules
from llmcli.model import Model
from llmcli.nn.step import Emitted
from llmcli.records.contribution import Contribution

_NUMBERS = 1 << 22  # of a matrix, in float64 at a time
# by the group of `timing`: what a term is called that is not one of heads, experts or biases
KINDS = {"embed": "embedding", "ffn_down": "mlp", "shared": "shared expert"}
KINDS |= {"ple": "layer embedding"}
LINEAR = (ops.Add, ops.LookUp, ops.Normalize, ops.Project, SumExperts)


def explained(model: Model, name: str) -> bool:
    """Whether an activation is linear in the residual stream but for the divisors of norms."""
    return name in graph(model.config) and _linear(graph(model.config)[name])


def _linear(node: Node) -> bool:
    op = node.op
    if isinstance(op, ops.Project):
        return op.clip is None
    return isinstance(op, LINEAR) and len(node.axes) == 2


class Contributions:
    """The terms of the number with the gradient `g` along the last token's row of `name`.

    `emitted`: the rows of the last token of all activations that are written, `[…, 1, …]` without
    a batch axis. `terms` add up to `value` but for roundings: one of each number on the way, all of
    them independent, is `rounding` large. Heads side by side are one row in `g`.
    """

    def __init__(
        self, model: Model, ids: Sequence[int], emitted: Emitted, name: str, g: Tensor
    ) -> None:
        self._graph, last = graph(model.config), [len(ids) - 1]
        self._own = Kernel(model, rules(model.config), ids, emitted=emitted, positions=last)
        self._pending, self._edited = {name: g}, edited(model)
        self.value = float(g @ self._row(name))
        self.rounding = 0.0
        self.terms: list[Contribution] = []
        for node in reversed(list(self._graph.nodes.values())):
            if node.name in self._pending:
                walked = self._walk(node, self._pending.pop(node.name))
                self.terms[:0] = [
                    Contribution(kind=kind, name=name, layer=node.layer, index=index, value=value)
                    for kind, name, index, value in walked
                ]

    @property
    def sum(self) -> float:
        """The sum of all terms."""
        return math.fsum(term.value for term in self.terms)

    def _row(self, name: str) -> Tensor:
        return concatenated(self._own[name])[0]

    def _pass(self, name: str, g: Tensor) -> None:
        self._pending[name] = self._pending.get(name, 0) + g

    def _rounds(self, name: str, products: Tensor) -> None:
        eps = torch.finfo(self._own.dtype_of(name)).eps
        self.rounding = math.hypot(self.rounding, eps * float(products.norm()))

    def _walk(self, node: Node, g: Tensor) -> Iterator[tuple[str, str, int | None, float]]:
        """Kind, name, index and value of the terms at a node; the rest goes on to its inputs."""
        op, own, row = node.op, self._own, self._row(node.name)
        self._rounds(node.name, g * row)
        if node.name in self._edited:  # what stands in its place is a term of its own
            yield "edit", node.name, None, float(g @ row)
            return
        bias = op.bias if isinstance(op, ops.Project | ops.Normalize) else None
        if bias is not None:
            b = own.vector(bias)
            row = row - b
            yield "bias", bias, None, float(g @ b)
        if isinstance(op, ops.Add):
            factor = op.scale if op.weight is None else op.scale * float(own.vector(op.weight))
            for part in op.parts:
                self._pass(part, factor * g)
        elif isinstance(op, ops.Normalize):
            rule = own.rules[node.name]
            assert isinstance(rule, Normalize)
            if op.weight is not None:
                g = g * (own.vector(op.weight) + op.norm.offset)
            g = g / rule.scales(own[op.source])[0]
            self._pass(op.source, g - g.mean() if op.norm.kind == "layer" else g)
        elif isinstance(op, ops.Project) and _linear(self._graph[op.source]):
            g = turned(own.model, op.weight, g)
            self._pass(op.source, g)
            if own.rounded(op.weight):
                apart = own.read(op.source, op.weight)[0] - self._row(op.source)
                yield "rounding", op.source, None, float(g @ apart)
        elif isinstance(op, ops.Project) and len(self._graph[op.source].axes) == 3:
            products = turned(own.model, op.weight, g) * own.read(op.source, op.weight)[0]
            products_He = products.view(len(own[op.source]), -1)
            self._rounds(node.name, products_He)
            for head, value in enumerate(products_He.sum(1).tolist()):
                yield "head", op.source, head, value
        elif isinstance(op, SumExperts):
            project = self._graph[op.value].op
            assert isinstance(project, ExpertProject)
            share_K = own[op.share][0] if op.share is not None else 1.0
            parts_K = own[op.value][:, 0] @ g * share_K
            chosen_K = own[project.chosen][0].long()
            for expert, value in zip(chosen_K.tolist(), parts_K.tolist(), strict=True):
                yield "expert", op.value, expert, value
            if op.also is not None:
                self._pass(op.also, g)
        else:
            yield KINDS.get(node.group, "mixer"), node.name, None, float(g @ row)


def turned(model: Model, weight: str, g: Tensor) -> Tensor:
    """`W g`, of as many columns as `g` has numbers that are not 0, some at a time: float64."""
    matrix, at = model.decoder.weight(weight), g.nonzero()[:, 0]
    step = max(1, _NUMBERS // matrix.shape[-1])
    parts = (g[some] @ exact(matrix.rows(some.to(model.device))) for some in torch.split(at, step))
    return sum(parts, torch.zeros(matrix.shape[-1], dtype=torch.float64))
