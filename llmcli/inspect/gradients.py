"""The gradient of a number of the logits at every activation: one pass, then backwards through it.

The decoder's kernels have no gradients. Backwards, the nodes of one block at a time are evaluated
from what entered it in the pass, by the graph's own rules in float64, and autograd turns the
gradient at what leaves the block into those inside and at what entered. Memory is that of one
block: its activations and its matrices. Experts stay those that were chosen, and the input of a
product is not rounded.

Axes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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
from llmcli.inspect.kernel import Kernel, rules
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

    Raises UsageError for a model with edits, where an operation has no gradient, and OutOfMemory.
    """

    def __init__(
        self, model: Model, ids: Sequence[int], metric: Metric, names: Collection[str]
    ) -> None:
        if model.decoder.edits:
            raise UsageError(
                "gradients are those of the model without an `--edit`",
                hint="leave `--edit` or `--method gradient` out",
            )
        self._model, self._ids, self._names = model, tuple(ids), set(names)
        self._graph, self._rules = graph(model.config), rules(model.config)
        nodes = self._graph.nodes
        self._copies = {  # what is another activation under a name of its own
            node.name: node.shares for node in nodes.values()
            if node.shares in nodes and nodes[node.shares].axes == node.axes
        }  # fmt: skip
        blocks = _blocks(self._graph)
        kept = self._names | {one for block in blocks for one in self._kept(block)}
        self.emitted: dict[str, Tensor] = {}
        self.at: dict[str, Tensor] = {}
        self.apart: dict[str, float] = {}
        devices.require_memory(
            max(map(self._bytes, blocks)),
            torch.device("cpu"),
            f"the activations of a block for {len(ids)} tokens and their gradients",
            "use a shorter prompt",
        )

        def tap(name: str, tensor: Tensor) -> None:
            if name in kept or name.startswith("logits"):
                self.emitted[name] = tensor[0]

        Passes(model, ids).at_once(tap, logits="last", until=None)
        with torch.inference_mode(False), torch.enable_grad():
            logits_V = exact(self.emitted["logits"][-1]).requires_grad_()
            value = metric(logits_V)
            self.value = float(value.detach())
            (g_V,) = torch.autograd.grad(value, logits_V)
            pending = self._head(g_V)
            for block in reversed(blocks):
                self._backward(block, pending)

    @property
    def tolerance(self) -> float:
        """How far `apart` may be: what kernels round in one block, inputs of products included."""
        model = self._model
        weights = map(model.decoder.weight, self._graph.parameters)
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
        raw = self._graph["logits_raw"].op
        assert isinstance(raw, ops.Project)
        if not isinstance(self._graph["logits"].op, ops.Project):  # a scale, or a cap
            raw_1V = exact(self.emitted["logits_raw"][-1:]).requires_grad_()
            made_1V = self._rules["logits"].tensor(self._of({"logits_raw": raw_1V}))
            (g_1V,) = torch.autograd.grad(made_1V, raw_1V, g_V[None])
            g_V = g_1V[0]
        g_D = turned(self._model, raw.weight, g_V)
        g_TD = g_D.new_zeros(len(self._ids), len(g_D))
        g_TD[-1] = g_D
        return {raw.source: g_TD}

    def _of(self, known: dict[str, Tensor]) -> _Evaluated:
        return _Evaluated(self._model, self._rules, self._ids, emitted=known)

    def _backward(self, nodes: Sequence[Node], pending: dict[str, Tensor]) -> None:
        """From the `pending` gradients at what leaves these nodes to those at what enters them."""
        leaves = [node.name for node in nodes if node.name in pending]
        needed = set(leaves)
        for node in reversed(nodes):
            if node.name in needed:
                needed |= set(self._inputs(node))
        entering = needed - {node.name for node in nodes}
        known = {n.name: self.emitted[n.name] for n in nodes if n.integer}
        known |= {name: exact(self.emitted[name]).requires_grad_() for name in entering}
        values = self._of(known)
        for node in nodes:
            if node.name in needed & self._copies.keys():
                made = values[self._copies[node.name]]
                known[node.name] = made.view_as(made)
            elif node.name in needed:
                made = self._rules[node.name].tensor(values)
                reads = any(known[name].requires_grad for name in node.op.inputs)
                if reads and not (made.requires_grad or node.integer):
                    raise UsageError(
                        f"`{node.name}` is evaluated as a whole, without a gradient",
                        hint="attribution without gradients, and exact patching, take any "
                        "operation",
                    )
                # rows of a table are where the way back ends
                known[node.name] = made if node.op.inputs else made.requires_grad_()
        last, inputs = nodes[-1].name, [n for n in known if n in self._names | entering]
        theirs = exact(self.emitted[last])  # of what enters the head there is the last row
        ours = values[last].detach()[-len(theirs) :]
        self.apart[last] = float((ours - theirs).norm() / theirs.norm())
        if not inputs:
            return
        found = torch.autograd.grad(
            [values[name] for name in leaves],
            [values[name] for name in inputs],
            [pending.pop(name) for name in leaves],
            allow_unused=True,
        )
        for name, g in zip(inputs, found, strict=True):
            if g is not None and name not in entering:
                self.at[name] = g
            elif g is not None:
                pending[name] = pending.get(name, 0) + g

    def _inputs(self, node: Node) -> tuple[str, ...]:
        copied = self._copies.get(node.name)
        return self._rules[node.name].inputs if copied is None else (copied,)


class _Evaluated(Kernel):
    """Activations of a block by name, of all tokens, for autograd in float64."""

    def __getitem__(self, name: str) -> Tensor:
        return self.emitted[name]

    def every(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Rows of an activation."""
        return self.emitted[name][..., rows, :]

    def read(self, name: str, weight: str) -> Tensor:
        """The input of a product, not rounded."""
        return concatenated(self.emitted[name])


def _blocks(model: Graph) -> list[list[Node]]:
    """The nodes in groups, each up to the stream that enters the next block; without the logits."""
    found: list[list[Node]] = [[]]
    for node in model.nodes.values():
        if not node.name.startswith("logits"):
            found[-1].append(node)
        if node.name.endswith(".resid_pre"):
            found.append([])
    return found
