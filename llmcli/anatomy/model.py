"""The tensors of a model for one call: the rows of its graph with shapes, dtypes and FLOPs."""

from __future__ import annotations

from collections.abc import Iterator

from llmcli.anatomy.graph import Graph, graph
from llmcli.config import ModelConfig
from llmcli.graph.node import Node
from llmcli.graph.ops import Project, size
from llmcli.graph.spec import Call, Logits, Phase, TensorSpec, wide_dtype


def parameters(config: ModelConfig, *, dtype: str | None = None) -> tuple[TensorSpec, ...]:
    """Every parameter of the model in execution order; a tied head has none of its own.

    `dtype` is what the model computes in: some are kept in at least float32 all the same. A stack
    of matrices is `[E, in, out]` in the formula's orientation, and each is stored transposed.
    """
    model = graph(config)
    specs = []
    for row in model.parameters.values():
        sizes = model.sizes(row.layer)
        shape = tuple(size(axis, sizes) for axis in row.axes)
        specs.append(TensorSpec(
            name=row.name, kind="parameter", axes=row.axes, shape=shape,
            stored_shape=(*shape[:-2], *shape[:-3:-1]) if row.turned else shape,
            dtype=wide_dtype(dtype) if row.wide else dtype,
            formula=model.formula(model[row.makes]), layer=row.layer, shares=row.shares,
        ))  # fmt: skip
    return tuple(specs)


def activations(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int,
    phase: Phase,
    logits: Logits = "all",
    dtype: str | None = None,
) -> tuple[TensorSpec, ...]:
    """Every activation that one forward call emits, in execution order.

    `batch` sequences bring `tokens` new positions each after `past` cached ones; with
    `logits="last"` only the last position goes through the final norm and the head, with `none`
    no position does.
    """
    call = Call(batch=batch, tokens=tokens, past=past, phase=phase, dtype=dtype)
    return tuple(spec for spec in executed(graph(config), call, logits) if spec.written)


def unwritten(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int,
    phase: Phase,
    dtype: str | None = None,
) -> tuple[TensorSpec, ...]:
    """What the same call computes but never has in memory: every layer's `attn.scores`,
    `attn.pattern` and `attn.result`, which are derived from what it emits.
    """
    call = Call(batch=batch, tokens=tokens, past=past, phase=phase, dtype=dtype)
    return tuple(spec for spec in executed(graph(config), call, "all") if not spec.written)


def calculated(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int,
    phase: Phase,
    logits: Logits = "all",
    dtype: str | None = None,
) -> tuple[TensorSpec, ...]:
    """`activations` and `unwritten` together, in execution order."""
    call = Call(batch=batch, tokens=tokens, past=past, phase=phase, dtype=dtype)
    return tuple(executed(graph(config), call, logits))


def states(
    config: ModelConfig, *, batch: int, capacity: int, dtype: str | None = None
) -> tuple[TensorSpec, ...]:
    """What is kept between calls, for `capacity` positions: keys and values of every layer."""
    model = graph(config)
    found = []
    for row in model.states.values():
        sizes = {**model.sizes(row.layer), "B": batch, "S": capacity}
        axes = ("B", *row.axes)
        found.append(TensorSpec(
            name=row.name, kind="state", axes=axes, shape=tuple(sizes[axis] for axis in axes),
            formula=row.formula, dtype=wide_dtype(dtype) if row.wide else dtype, layer=row.layer,
        ))  # fmt: skip
    return tuple(found)


def executed(model: Graph, call: Call, logits: Logits) -> Iterator[TensorSpec]:
    """The activations of one call, those that no kernel writes among them."""
    wide = {
        node.op.fused for node in model.nodes.values() if node.wide and isinstance(node.op, Project)
    }
    for node in model.nodes.values():
        if node.ends and logits == "none":
            continue
        tokens = 1 if node.ends and logits == "last" else call.tokens
        sizes = {**model.sizes(node.layer), "B": call.batch, "T": tokens, "S": call.keys}
        axes = ("B", *node.axes)
        same = node.shares is not None and node.shares in model.nodes
        same = same and model[str(node.shares)].op is node.op
        flops, masked = (0, 0) if same else node.op.flops(call, tokens, sizes)
        yield TensorSpec(
            name=node.name, kind="activation", axes=axes,
            shape=tuple(sizes[axis] for axis in axes),
            formula=f"{node.name} = {node.shares}" if same else model.formula(node),
            dtype=call.wide_dtype if node.wide else call.dtype,
            flops=flops, masked_flops=masked, layer=node.layer, phase=call.phase,
            shares=_memory(node, call, wide), written=node.written,
        )  # fmt: skip


def _memory(node: Node, call: Call, wide: set[str]) -> str | None:
    """What it is a view of: what one product gives for several is in its widest dtype.

    What of it is kept narrower is a copy.
    """
    if not isinstance(node.op, Project) or not node.op.fused:
        return node.shares
    copied = node.op.fused in wide and not node.wide and call.dtype != call.wide_dtype
    return None if copied else node.op.fused
