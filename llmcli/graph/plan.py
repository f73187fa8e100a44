"""The tensors of a model as specs: parameters, states, and the activations of one call. No torch.

The graph defines dependencies; the call determines whether an activation is stored, derived, or a
view of another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from llmcli.config.formats import PACKED
from llmcli.config.model import ModelConfig
from llmcli.graph.graph import Graph, graph
from llmcli.graph.node import Node, Parameter, State
from llmcli.graph.ops import Project, Sizes, size
from llmcli.graph.routing import ExpertProject
from llmcli.graph.spec import Call, Kind, Logits, TensorSpec, wide_dtype

_DENSE: Mapping[str, str] = {}


def parameters(
    config: ModelConfig,
    *,
    dtype: str | None = None,
    formats: Mapping[str, str] = _DENSE,
    file_layout: bool = False,
) -> tuple[TensorSpec, ...]:
    """Every parameter of the model in execution order; a tied head has none.

    `dtype`: of the model's arithmetic; some parameters have at least float32. Parameters in
    `formats` (by name) keep the file's format: blocks (`Q4_K`) in separate memory, 16 bits together
    with those of the same dtype and product. `file_layout`: blocks in the file's layout. A stack of
    matrices is `[E, in, out]` in the formula's orientation, each stored transposed.
    """
    return _parameters(config, dtype, tuple(formats.items()), file_layout)


@lru_cache(maxsize=16)
def _parameters(
    config: ModelConfig, dtype: str | None, formats: tuple[tuple[str, str], ...], file_layout: bool
) -> tuple[TensorSpec, ...]:
    """Cached, since a load needs it several times."""
    model, stored = graph(config), dict(formats)
    together: dict[str, set[str | None]] = {}
    for row in model.parameters.values():
        together.setdefault(row.shares or row.name, set()).add(stored.get(row.name))
    specs = []
    for row in model.parameters.values():
        kinds = together[row.shares or row.name]
        apart = len(kinds) > 1 or not kinds.isdisjoint(PACKED)
        dtype_of = stored.get(row.name) or (wide_dtype(dtype) if row.wide else dtype)
        shares = None if apart else row.shares
        memory: dict[str, Any] = {"shares": shares, "file_layout": file_layout}
        formula = model.formula(model[row.output])
        sizes = model.sizes(row.layer)
        specs.append(_spec(row, "parameter", sizes, formula, dtype_of, **memory))
    return tuple(specs)


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → stored shape of every parameter."""
    return {spec.name: spec.stored_shape or spec.shape for spec in parameters(config)}


def states(
    config: ModelConfig,
    *,
    batch: int,
    capacity: int,
    dtype: str | None = None,
    cache: str | None = None,
) -> tuple[TensorSpec, ...]:
    """States kept between calls, for `capacity` positions: keys and values of every layer.

    `cache`: dtype of keys and values if different from `dtype`.
    """
    model = graph(config)
    found = []
    for row in model.states.values():
        sizes = {**model.sizes(row.layer), "B": batch, "S": capacity}
        kept = wide_dtype(dtype) if row.wide else cache or dtype if row.cached else dtype
        found.append(_spec(row, "state", sizes, row.formula, kept))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The activations of one `call` in execution order, with shape, dtype, bytes, FLOPs, memory."""

    call: Call
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def written(self) -> tuple[TensorSpec, ...]:
        """Activations visible to a tap: stored by kernels, in separate memory or as views."""
        return tuple(spec for spec in self.tensors if spec.written)

    @cached_property
    def derived(self) -> tuple[TensorSpec, ...]:
        """Activations that no kernel stores, computed from others for display."""
        return tuple(spec for spec in self.tensors if not spec.written)


def plan(
    config: ModelConfig,
    call: Call,
    *,
    logits: Logits = "all",
    edited: Collection[str] = (),
    layers: Collection[int | None] | None = None,
) -> Plan:
    """The activations of `call`.

    With `logits="last"` final norm and head are computed for the last position only, with `none`
    for no position. A kernel is not used in layers where a covered activation is `edited`.
    `layers`: only of these (None: outside the layers), by default of all.
    """
    return Plan(call=call, tensors=tuple(_tensors(graph(config), call, logits, edited, layers)))


def _tensors(
    model: Graph,
    call: Call,
    logits: Logits,
    edited: Collection[str],
    layers: Collection[int | None] | None,
) -> Iterator[TensorSpec]:
    derived = model.derived(edited)
    for node in model.nodes.values():
        if (node.ends and logits == "none") or (layers is not None and node.layer not in layers):
            continue
        tokens = 1 if node.ends and logits == "last" else call.tokens
        sizes = {**model.sizes(node.layer), "B": call.batch, "T": tokens, "S": call.keys}
        same = node.shares is not None and node.shares in model.nodes
        same = same and model[str(node.shares)].op is node.op
        full, masked = (0, 0) if same or node.tap_only else node.op.flops(call, tokens, sizes)
        other: dict[str, Any] = {"shares": _memory(node, call, model), "phase": call.phase}
        other |= {"flops": full - masked, "flops_full": full, "written": node.name not in derived}
        own = model.formula(node), _dtype(node, call, model)
        yield _spec(node, "activation", sizes, *own, **other)


def _spec(
    row: Node | Parameter | State,
    kind: Kind,
    sizes: Sizes,
    formula: str,
    dtype: str | None,
    **other: Any,
) -> TensorSpec:
    """The tensor of a row; activations and states have one for each sequence of the batch."""
    axes = row.axes if kind == "parameter" else ("B", *row.axes)
    shape = tuple(size(axis, sizes) for axis in axes)
    if isinstance(row, Parameter):
        other["stored_shape"] = (*shape[:-2], *shape[:-3:-1]) if row.transposed else shape
    other |= {"kind": kind, "layer": row.layer, "dtype": dtype}
    return TensorSpec(name=row.name, axes=axes, shape=shape, formula=formula, **other)


def _dtype(node: Node, call: Call, model: Graph) -> str | None:
    if node.integer:
        return "int64"
    if node.wide:
        return call.wide_dtype
    return call.cache_dtype if node.name in model.cached else call.dtype


def _memory(node: Node, call: Call, model: Graph) -> str | None:
    """The memory that a node is a view of: a fused product's result has the widest dtype.

    Narrower and clipped parts are copies, as are keys and values in the cache's dtype.
    """
    if node.name in model.cached and call.cache_dtype != call.dtype:
        return None
    if not isinstance(node.op, Project | ExpertProject) or not node.op.fused:
        return node.shares
    fused, copied = node.op.fused, not node.wide and call.dtype != call.wide_dtype
    copied = copied or (isinstance(node.op, Project) and node.op.clip is not None)
    return None if copied and fused in model.wide_products else fused
