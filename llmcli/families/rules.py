"""Tensor names of a checkpoint → parameters of the model, as data.

A rule names checkpoint tensors by a pattern in which `{layer}` stands for a layer's number.
Several renames may have the same source: each takes its own slice of a fused tensor.

The operations of a rename apply from left to right, each to what the one before it gave, and
the first to the matrix as the file stores it. *Row* operations only choose or reorder rows and
are legal on packed blocks; *value* operations need the numbers themselves, so that a packed
tensor has to be dequantized for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmcli.config import ModelConfig
from llmcli.families.scales import Grid, Scale


@dataclass(frozen=True)
class Rows:
    """Row operation: rows (of a vector: numbers) `start` up to but not including `stop`."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"rows {self.start}:{self.stop}"


@dataclass(frozen=True)
class UnpairRows:
    """Row operation: undo llama.cpp's interleaving of query and key rows.

    The file rotates number 2j of a head against 2j+1, we rotate j against j + dims/2. So within
    each of `heads` equal groups of rows the first `dims` rows go into the order
    0, 2, 4, … 1, 3, 5, …; the rows of a group after those `dims` stay where they are.
    """

    heads: int
    dims: int

    def __str__(self) -> str:
        return f"unpaired rows of {self.heads} heads"


@dataclass(frozen=True)
class Transpose:
    """Value operation: a matrix stored `[in, out]` (Conv1D) becomes `[out, in]`."""

    def __str__(self) -> str:
        return "transposed"


Op = Rows | UnpairRows | Transpose


class Rename:
    """Checkpoint tensor `source` fills parameter `target` after the operations `ops`."""

    __slots__ = ("ops", "source", "target")

    def __init__(self, source: str, target: str, *ops: Op) -> None:
        self.source = source
        self.target = target
        self.ops = ops

    def __repr__(self) -> str:
        return f"Rename({self.source!r} -> {self.target!r}, {list(map(str, self.ops))})"


@dataclass(frozen=True)
class Drop:
    """Checkpoint tensors of that pattern are known and not needed, for `reason`."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class Beside:
    """Checkpoint tensor `pattern` belongs to the tensor `weight`, which is quantized.

    It is its scale, which lies as `grid` says, or (`grid` None) the byte that tells the layout.
    """

    pattern: str
    weight: str
    grid: Grid | None


Rule = Rename | Drop | Beside


@dataclass(frozen=True)
class Load:
    """Checkpoint tensor `source`, times its `scale`, through `ops` into parameter `target`."""

    source: str
    target: str
    ops: tuple[Op, ...]
    scale: Scale | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """What is done to the stored numbers, in order."""
        scaled = () if self.scale is None else (str(self.scale),)
        return (*scaled, *(str(op) for op in self.ops))


@dataclass(frozen=True)
class Plan:
    """What the rules make of a list of names.

    `dropped` are (name, reason); `unexpected` are names that no rule knows. `scales` is what a
    scale is called in place of `weight`, None where the weights are not quantized. `sources` are
    the patterns of tensors by those of the parameters that they would fill.
    """

    loads: tuple[Load, ...]
    dropped: tuple[tuple[str, str], ...]
    unexpected: tuple[str, ...]
    scales: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def source_of(self, parameter: str) -> str | None:
        """What the tensor that fills `parameter` is called; None where no rule fills it."""
        skeleton, numbers = _skeleton(parameter)
        pattern = self.sources.get(skeleton)
        return None if pattern is None else _filled(pattern, numbers)


HF_HEAD = "lm_head.weight"  # what transformers calls the output head, in every family
# At most six digits: a name is the file's own text, and a million layers is out of bounds anyway.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_PLACEHOLDER = re.compile(r"\{[a-z]+\}")


def plan(names: Iterable[str], rules: Sequence[Rule], config: ModelConfig) -> Plan:
    """Applies the rules to the names without reading anything.

    A layer's number beyond the configuration's last layer makes a name unexpected. Time is
    linear in the names: a rule is found by the whole name, or by it with its numbers taken out.
    """
    exact: dict[str, list[Rule]] = {}
    numbered: dict[str, list[Rule]] = {}
    beside: dict[str, list[tuple[str, Grid | None]]] = {}
    for rule in rules:
        pattern = rule.source if isinstance(rule, Rename) else rule.pattern
        skeleton = _PLACEHOLDER.sub("{}", pattern)
        (exact if skeleton == pattern else numbered).setdefault(skeleton, []).append(rule)
    loads: list[Load] = []
    dropped: list[tuple[str, str]] = []
    unexpected: list[str] = []
    for name in names:
        skeleton, numbers = _skeleton(name)
        found = exact.get(name)
        if found is None and all(number < len(config.layers) for number in numbers):
            found = numbered.get(skeleton)
        if found is None:
            unexpected.append(name)
        for rule in found or ():
            if isinstance(rule, Drop):
                dropped.append((name, rule.reason))
            elif isinstance(rule, Beside):
                beside.setdefault(_filled(rule.weight, numbers), []).append((name, rule.grid))
            else:
                loads.append(Load(name, _filled(rule.target, numbers), rule.ops))
    scaled, unused = _scaled(loads, beside)
    called = (rule.pattern for rule in rules if isinstance(rule, Beside) and rule.grid)
    return Plan(
        loads=tuple(scaled),
        dropped=tuple(dropped),
        unexpected=(*unexpected, *unused),
        scales=next((pattern.rpartition(".")[2] for pattern in called), None),
        sources={
            _PLACEHOLDER.sub("{}", rule.target): rule.source
            for rule in reversed(rules)  # of two names for one, the family has its usual one first
            if isinstance(rule, Rename)
        },
    )


def _scaled(
    loads: Sequence[Load], beside: Mapping[str, Sequence[tuple[str, Grid | None]]]
) -> tuple[list[Load], list[str]]:
    """The loads with the scales that lie beside their tensors, and the names without a use."""
    scales: dict[str, Scale] = {}
    unused: list[str] = []
    known = {load.source for load in loads}
    for weight, given in beside.items():
        layout = next((name for name, grid in given if grid is None), None)
        named = [(name, grid) for name, grid in given if grid is not None]
        if weight in known and named:
            source, grid = named[0]
            scales[weight] = Scale(source=source, grid=grid, layout=layout)
            unused += [name for name, _ in named[1:]]
        else:
            unused += [name for name, _ in given]
    return [replace(load, scale=scales.get(load.source)) for load in loads], unused


def _skeleton(name: str) -> tuple[str, list[int]]:
    parts = name.split(".")
    numbers = [int(part) for part in parts if _NUMBER.fullmatch(part)]
    return ".".join("{}" if _NUMBER.fullmatch(part) else part for part in parts), numbers


def _filled(target: str, numbers: Sequence[int]) -> str:
    remaining = iter(numbers)
    return _PLACEHOLDER.sub(lambda _: str(next(remaining)), target)


def shape_after(shape: tuple[int, ...], ops: Sequence[Op]) -> tuple[int, ...] | None:
    """The shape that a rule's operations leave; None where they cannot be done on it."""
    for op in ops:
        match op:
            case Rows(start=start, stop=stop) if shape and stop <= shape[0]:
                shape = (stop - start, *shape[1:])
            case UnpairRows(heads=heads) if shape and shape[0] % heads == 0:
                pass
            case Transpose() if len(shape) == 2:
                shape = (shape[1], shape[0])
            case _:
                return None
    return shape
