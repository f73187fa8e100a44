"""A model's parameters and states, independent of calls. No torch."""

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
    """Every parameter of the model in execution order; a tied head has none.

    `dtype`: of the model's arithmetic; some parameters have at least float32. Parameters in
    `formats` (by name) keep the file's format: blocks (`Q4_K`) in separate memory, 16 bits together
    with those of the same dtype and product. `as_stored`: blocks in the file's layout. A stack of
    matrices is `[E, in, out]` in the formula's orientation, each stored transposed.
    """
    return _parameters(config, dtype, tuple(formats.items()), as_stored)


@lru_cache(maxsize=16)
def _parameters(
    config: ModelConfig, dtype: str | None, formats: tuple[tuple[str, str], ...], as_stored: bool
) -> tuple[TensorSpec, ...]:
    """Cached, since a load needs it several times."""
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
        axes = ("B", *row.axes)
        found.append(TensorSpec(
            name=row.name, kind="state", axes=axes, shape=tuple(size(axis, sizes) for axis in axes),
            formula=row.formula, layer=row.layer,
            dtype=wide_dtype(dtype) if row.wide else cache or dtype if row.cached else dtype,
        ))  # fmt: skip
    return tuple(found)
