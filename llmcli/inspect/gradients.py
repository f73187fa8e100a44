"""The gradient of a number of the logits at every activation: one pass, then backwards through it.

The decoder's kernels have no gradients. Backwards, the nodes of one block at a time are evaluated
from what entered it in the pass, by the graph's own rules in float64, and autograd turns the
gradient at what leaves the block into those inside and at what entered. Memory is that of one
block: its activations and its matrices. Experts stay those that were chosen, and the input of a
product is not rounded.

Axes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from llmcli import devices
from llmcli.errors import UsageError
from llmcli.evaluate.rule import concatenated, exact
from llmcli.graph import ops
from llmcli.graph.graph import Graph, graph
from llmcli.graph.node import Node
from llmcli.inspect.contributions import turned
from llmcli.inspect.kernel import Kernel, refuse_edited, rules
from llmcli.inspect.passes import Passes
from llmcli.model import Model
from llmcli.weights.packed import Packed

# How many eps of its dtype a block may be off, the whole stream of all tokens together. Measured,
# the worst: 5.7 in float32 (smollm2), 4.6 in float64, 1.3 in 16 bits (small models).
ROUNDINGS, NARROW_ROUNDINGS = 16, 4
# … and how many steps of a product's input that its kernel rounds: 1.7 of 8 bits.
STEPS = 4

Metric = Callable[[Tensor], Tensor]  # the logits `[V]` of the last token → a number


class Gradients:
    """Of `metric` after the tokens `ids`: `emitted` and `at`, both by name, without a batch axis.

    `emitted` is what the pass wrote of `names` and of what enters blocks, in its own dtype; `at`
    the gradients at `names`, float64 on the CPU, of those that the number depends on. `apart`: how
    far the stream after each block, as evaluated, is from the one that was written, relative.

    Raises UsageError where an operation of the model has no gradient, and OutOfMemory.
    """

    def __init__(
        self, model: Model, ids: Sequence[int], metric: Metric, names: Collection[str]
    ) -> None:
        refuse_edited(model, graph(model.config).nodes)
        self._model, self._ids, self._names = model, tuple(ids), set(names)
        self._graph = graph(model.config)
        self._rules = rules(model.config)
        self._blocks = list(_blocks(self._graph))
        kept = self._names | {one for nodes in self._blocks for one in self._kept(nodes)}
        self.emitted: dict[str, Tensor] = {}
        devices.require_memory(
            max(map(self._bytes, self._blocks)),
            torch.device("cpu"),
            f"the activations of a block for {len(ids)} tokens and their gradients",
            "use a shorter prompt",
        )

        def tap(name: str, tensor: Tensor) -> None:
            if name in kept or name.startswith("logits"):
                self.emitted[name] = tensor[0]

        Passes(model, ids).at_once(tap, logits="last", until=None)
        self.at: dict[str, Tensor] = {}
        self.apart: dict[str, float] = {}
        with torch.inference_mode(False), torch.enable_grad():
            logits_V = exact(self.emitted["logits"][-1]).requires_grad_()
            value = metric(logits_V)
            self.value = float(value.detach())
            (g_V,) = torch.autograd.grad(value, logits_V)
            pending = self._head(g_V)
            for nodes in reversed(self._blocks):
                self._backward(nodes, pending)

    @property
    def tolerance(self) -> float:
        """How far `apart` may be: what kernels round in one block, inputs of products included."""
        model, parameters = self._model, self._graph.parameters
        weights = [model.decoder.weight(name) for name in parameters]
        digits = [weight.digits for weight in weights if isinstance(weight, Packed)]
        inputs = STEPS * 2.0 ** (1 - 8 * min(digits)) if digits else 0.0
        kept = torch.finfo(model.decoder.cache_dtype).eps
        roundings = NARROW_ROUNDINGS if model.dtype.itemsize == 2 else ROUNDINGS
        return roundings * torch.finfo(model.dtype).eps + kept + inputs

    def _bytes(self, nodes: Sequence[Node]) -> int:
        """About what these nodes take: what is computed on the way, it and its gradient."""
        tokens = dict.fromkeys("TS", len(self._ids))
        shapes = ((n, {**self._graph.sizes(n.layer), **tokens}) for n in nodes if not n.tap_only)
        return 24 * sum(prod(ops.size(axis, sizes) for axis in n.axes) for n, sizes in shapes)

    def _kept(self, nodes: Sequence[Node]) -> Iterator[str]:
        """What enters a group of nodes, what leaves it, and its choices of experts."""
        own = {node.name for node in nodes}
        for node in nodes:
            yield from (name for name in self._inputs(node) if name not in own)
            if node.integer:
                yield node.name
        yield nodes[-1].name

    def _head(self, g_V: Tensor) -> dict[str, Tensor]:
        """The gradient at what enters the head, whose last row alone counts."""
        raw, last = self._graph["logits_raw"].op, self._graph["logits"].op
        assert isinstance(raw, ops.Project)
        if not isinstance(last, ops.Project):  # a scale, or a cap
            own = self._of({"logits_raw": exact(self.emitted["logits_raw"][-1:]).requires_grad_()})
            made = self._rules["logits"].tensor(own)[0]
            (g_1V,) = torch.autograd.grad(made, own["logits_raw"], g_V)
            g_V = g_1V[0]
        g_D = turned(self._model, raw.weight, g_V)
        g_TD = g_D.new_zeros(len(self._ids), len(g_D))
        g_TD[-1] = g_D
        return {raw.source: g_TD}

    def _of(self, known: dict[str, Tensor]) -> _Evaluated:
        return _Evaluated(self._model, self._rules, self._ids, emitted=self.emitted, known=known)

    def _backward(self, nodes: Sequence[Node], pending: dict[str, Tensor]) -> None:
        """From the `pending` gradients at what leaves these nodes to those at what enters them."""
        leaves = [node.name for node in nodes if node.name in pending]
        needed = set(leaves)
        for node in reversed(nodes):
            if node.name in needed:
                needed |= set(self._inputs(node))
        own = {node.name for node in nodes}
        entering = {n: exact(self.emitted[n]).requires_grad_() for n in needed - own}
        values = self._of(dict(entering))
        for node in nodes:
            if node.name in needed:
                values.known[node.name] = self._made(node, values)
        self._compare(nodes[-1].name, values.known)
        inside = [name for name in values.known if name in self._names and name in own]
        inputs = [*entering, *inside]
        if not inputs:
            return
        found = torch.autograd.grad(
            [values[name] for name in leaves],
            [values[name] for name in inputs],
            [pending.pop(name) for name in leaves],
            allow_unused=True,
        )
        for name, g in zip(inputs, found, strict=True):
            if g is not None and name in own:
                self.at[name] = g
            elif g is not None:
                pending[name] = pending.get(name, 0) + g

    def _copied(self, node: Node) -> str | None:
        """What an activation is under another name."""
        shared = self._graph.nodes.get(node.shares or "")
        return shared.name if shared is not None and shared.axes == node.axes else None

    def _inputs(self, node: Node) -> tuple[str, ...]:
        copied = self._copied(node)
        return self._rules[node.name].inputs if copied is None else (copied,)

    def _made(self, node: Node, values: _Evaluated) -> Tensor:
        if (copied := self._copied(node)) is not None:
            return values[copied].view_as(values[copied])
        made = self._rules[node.name].tensor(values)
        if not node.op.inputs:  # rows of a table, where the way back ends
            return made.requires_grad_()
        inputs = [values[name] for name in node.op.inputs]
        if not made.requires_grad and not node.integer and any(x.requires_grad for x in inputs):
            raise UsageError(
                f"`{node.name}` is evaluated as a whole, without a gradient",
                hint="attribution without gradients, and exact patching, take any operation",
            )
        return made

    def _compare(self, name: str, known: Mapping[str, Tensor]) -> None:
        if name in known:
            ours, theirs = known[name].detach(), exact(self.emitted[name])
            ours = ours[-len(theirs) :]  # of what enters the head there is the last row
            self.apart[name] = float((ours - theirs).norm() / theirs.norm())


class _Evaluated(Kernel):
    """Activations of a block by name, `known` of all tokens, for autograd in float64."""

    def __init__(self, *given: object, known: dict[str, Tensor], **more: object) -> None:
        super().__init__(*given, **more)  # type: ignore[arg-type]
        self.known = known

    def __getitem__(self, name: str) -> Tensor:
        return self.known[name]

    def every(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Rows of an activation of which all tokens are known."""
        return self.known[name][..., rows, :]

    def read(self, name: str, weight: str) -> Tensor:
        """The input of a product, not rounded."""
        return concatenated(self.known[name])


def _blocks(model: Graph) -> Iterator[list[Node]]:
    """The nodes in groups, each up to the stream that enters the next block; without the logits."""
    found: list[Node] = []
    for node in model.nodes.values():
        if node.name.startswith("logits"):
            break
        found.append(node)
        if node.name.endswith(".resid_pre"):
            yield found
            found = []
    yield found
