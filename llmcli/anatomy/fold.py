"""Merges repeated layers into one row if their tensors are equal up to the layer's number.

Configuration and specs of layers are compared; any difference (a window, a head count, a stored
format) keeps them separate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter

from llmcli.config import ModelConfig
from llmcli.graph.spec import TensorSpec
from llmcli.records.document import APART, derived
from llmcli.records.numbers import spans

# a layer's number in a name or formula: `blocks.3.`, `cache.3.`, `H of block 3`
_NUMBER = re.compile(r"((?<=blocks\.)\d+|(?<=cache\.)\d+|(?<=of block )\d+)")
# a layer's input, whose formula differs in the first layer and is ignored
_ENTRY = ".resid_pre"

# one tensor in every phase: specs that differ in shapes and dtypes only
Phases = tuple[TensorSpec, ...]
Member = tuple[Phases, Hashable]  # with its specs' contents without the layer's number
Extra = Callable[[TensorSpec], Hashable]


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A row: `phases` of its first layer; `layers` is empty outside the blocks."""

    name: str
    layers: tuple[int, ...]
    phases: Phases = field(metadata=APART)

    @derived
    def formula(self) -> str:
        """The formula; a reference to the previous block is generalized for all layers."""
        formula = self.phases[0].formula
        if len(self.layers) < 2:
            return formula
        return formula.replace(f"of block {self.layers[0] - 1}", "of the block before")


def fold_kinds(tensors: Sequence[Phases], config: ModelConfig, extra: Extra) -> tuple[Folded, ...]:
    """Rows of the parameters, then of the activations, then of the states."""
    rows: list[Folded] = []
    for kind in ("parameter", "activation", "state"):
        rows += fold([item for item in tensors if item[0].kind == kind], config, extra)
    return tuple(rows)


def fold(tensors: Sequence[Phases], config: ModelConfig, extra: Extra) -> tuple[Folded, ...]:
    """The rows of `tensors`, with equal layers merged at the first one's place.

    `extra`: additional key that must be equal, without layer numbers.
    """
    layers: dict[int, list[Member]] = {}
    for phases in tensors:
        if phases[0].layer is not None:
            template = tuple(_template(spec) for spec in phases)
            layers.setdefault(phases[0].layer, []).append((phases, template))
    alike: dict[Hashable, list[int]] = {}
    for layer, members in layers.items():
        alike.setdefault(_kind(layer, members, config), []).append(layer)
    kinds = {numbers[0]: numbers for numbers in alike.values()}
    rows: list[Folded] = []
    for phases in tensors:
        layer_ = phases[0].layer
        if layer_ is None:
            rows.append(Folded(name=phases[0].name, layers=(), phases=phases))
        elif layer_ in kinds:
            rows += _rows([layers[number] for number in kinds.pop(layer_)], extra)
    return tuple(rows)


def unfold(row: Folded) -> tuple[Phases, ...]:
    """Expand a row to its layers: the first one's specs with the others' numbers.

    Used to test the folding.
    """
    if not row.layers:
        return (row.phases,)
    first = row.layers[0]
    return tuple(tuple(_moved(spec, layer - first) for spec in row.phases) for layer in row.layers)


def numbered(text: str, layer: int, number: str) -> str:
    """`text` with `number` in place of the layer's number between dots."""
    return re.sub(rf"(?<![^.]){layer}(?![^.])", lambda _: number, text)


def _kind(layer: int, members: Sequence[Member], config: ModelConfig) -> Hashable:
    inside = (template for phases, template in members if not phases[0].name.endswith(_ENTRY))
    return config.layers[layer], tuple(inside)


def _rows(layers: Sequence[Sequence[Member]], extra: Extra) -> list[Folded]:
    """The rows of equal layers, tensor by tensor."""
    rows = []
    for same in zip(*layers, strict=True):
        parts: dict[Hashable, list[Phases]] = {}
        for phases, template in same:
            parts.setdefault((template, extra(phases[0])), []).append(phases)
        rows += [_row(part) for part in parts.values()]
    return rows


def _row(part: Sequence[Phases]) -> Folded:
    first = part[0][0]
    numbers = tuple(phases[0].layer for phases in part if phases[0].layer is not None)
    label = spans(numbers)
    label = f"{{{label}}}" if len(numbers) > 1 else label
    name = numbered(first.name, numbers[0], label)
    return Folded(name=name, layers=numbers, phases=part[0])


def _template(spec: TensorSpec) -> Hashable:
    """A spec's contents without the layer's number."""
    layer = spec.layer or 0
    return (
        _moved_text(spec.name, -layer),
        _moved_text(spec.formula, -layer),
        _moved_text(spec.shares or "", -layer),
        _plain(spec),
    )


_PLAIN = tuple(
    one.name
    for one in fields(TensorSpec)
    if one.name not in ("name", "formula", "shares", "layer")
)
_plain = attrgetter(*_PLAIN)


def _moved(spec: TensorSpec, by: int) -> TensorSpec:
    """The same tensor `by` layers later."""
    values = dict(zip(_PLAIN, _plain(spec), strict=True))
    return TensorSpec(
        name=_moved_text(spec.name, by),
        formula=_moved_text(spec.formula, by),
        shares=None if spec.shares is None else _moved_text(spec.shares, by),
        layer=None if spec.layer is None else spec.layer + by,
        **values,
    )


def _moved_text(text: str, by: int) -> str:
    pieces = _pieces(text)
    if len(pieces) == 1:
        return text
    return "".join(str(int(one) + by) if at % 2 else one for at, one in enumerate(pieces))


@lru_cache(maxsize=1 << 14)
def _pieces(text: str) -> tuple[str, ...]:
    """Split at layer numbers, every second piece a number; cached, since layers repeat texts."""
    return tuple(_NUMBER.split(text))
