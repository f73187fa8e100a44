"""What a model has whatever it is called with: its parameters, and its states. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from llmcli.anatomy.graph import graph
from llmcli.config import ModelConfig
from llmcli.graph.blocks import PACKED
from llmcli.graph.ops import size
from llmcli.graph.spec import TensorSpec, wide_dtype

_DENSE: Mapping[str, str] = {}


def parameters(
    config: ModelConfig, *, dtype: str | None = None, formats: Mapping[str, str] = _DENSE,
    as_stored: bool = False,
) -> tuple[TensorSpec, ...]:
    """Every parameter of the model in execution order; a tied head has none of its own.

    `dtype` is what the model computes in: some are kept in at least float32 all the same. Those in
    `formats`, by name, are as stored: in blocks (`Q4_K`) each in memory of its own, in 16 bits with
    those of the same dtype that share a product. `as_stored`: blocks lie as a file has them. A
    stack of matrices is `[E, in, out]` in the formula's orientation, and each is stored transposed.
    """
    return _parameters(config, dtype, tuple(formats.items()), as_stored)


@lru_cache(maxsize=16)
def _parameters(
    config: ModelConfig, dtype: str | None, formats: tuple[tuple[str, str], ...], as_stored: bool
) -> tuple[TensorSpec, ...]:
    """Once for what a load asks for several times."""
    model, stored = graph(config), dict(formats)
    together: dict[str, set[str | None]] = {}
    for row in model.parameters.values():
        together.setdefault(row.shares or row.name, set()).add(stored.get(row.name))
    apart = {
        root for root, kinds in together.items()
        if len(kinds) > 1 or not kinds.isdisjoint(PACKED)
    }  # fmt: skip
    specs = []
    for row in model.parameters.values():
        sizes = model.sizes(row.layer)
        shape = tuple(size(axis, sizes) for axis in row.axes)
        specs.append(TensorSpec(
            name=row.name, kind="parameter", axes=row.axes, shape=shape,
            stored_shape=(*shape[:-2], *shape[:-3:-1]) if row.turned else shape,
            dtype=stored.get(row.name) or (wide_dtype(dtype) if row.wide else dtype),
            formula=model.formula(model[row.makes]), layer=row.layer,
            shares=None if row.shares in apart else row.shares, as_stored=as_stored,
        ))  # fmt: skip
    return tuple(specs)


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter as a checkpoint fills it, by name."""
    return {spec.name: spec.stored_shape or spec.shape for spec in parameters(config)}


def states(
    config: ModelConfig,
    *,
    batch: int,
    capacity: int,
    dtype: str | None = None,
    cache: str | None = None,
) -> tuple[TensorSpec, ...]:
    """What is kept between calls, for `capacity` positions: keys and values of every layer.

    `cache` is the dtype of keys and values, where it is not `dtype`.
    """
    model = graph(config)
    found = []
    for row in model.states.values():
        sizes = {**model.sizes(row.layer), "B": batch, "S": capacity}
        axes = ("B", *row.axes)
        found.append(TensorSpec(
            name=row.name, kind="state", axes=axes, shape=tuple(size(axis, sizes) for axis in axes),
            formula=row.formula, layer=row.layer,
            dtype=wide_dtype(dtype) if row.wide else cache or dtype if row.cached else dtype,
        ))  # fmt: skip
    return tuple(found)
