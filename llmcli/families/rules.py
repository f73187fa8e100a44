"""Tensor names of a checkpoint → parameters of the model, as data.

A rule matches checkpoint tensors by a pattern with `{layer}` for a layer's number. `within` has the
ranges of other placeholders, such as `{expert}`; a number outside its range does not match. A
target ending in `[{expert}]` is one item along a parameter's first axis. Several renames may share
a source; each takes its slice of a fused tensor.

The operations of a rename apply from left to right, starting with the stored tensor. *Row*
operations only choose or reorder rows and work on packed blocks; *value* operations need a packed
tensor to be dequantized.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from llmcli.config.formats import IN_16_BITS, PACKED
from llmcli.config.model import ModelConfig
from llmcli.families.scales import Grid, Scale


@dataclass(frozen=True)
class Rows:
    """Row operation: rows (of a vector: elements) `start:stop` of each of `groups` equal groups.

    A fused tensor may hold q, k and v per head (GPT-NeoX), or interleaved gate and up rows
    (gpt-oss: a group is two rows).
    """

    start: int
    stop: int
    groups: int = 1

    def __str__(self) -> str:
        of = "" if self.groups == 1 else f" of each of {self.groups} groups"
        return f"rows {self.start}:{self.stop}{of}"


@dataclass(frozen=True)
class LaterRows(Rows):
    """Rows of which those before `start` are not used (OPT's positions)."""


@dataclass(frozen=True)
class UnpairRows:
    """Row operation: undo llama.cpp's interleaving of query and key rows.

    In the file RoPE pairs dimension 2j of a head with 2j+1, here j with j + dims/2. So within each
    of `heads` equal groups the first `dims` rows are reordered to 0, 2, 4, … 1, 3, 5, …; the rest
    stay.
    """

    heads: int
    dims: int

    def __str__(self) -> str:
        return f"unpaired rows of {self.heads} heads"

    def order(self, rows: int) -> list[int]:
        """The stored row of each output row; `heads` divides `rows`."""
        size = rows // self.heads
        dims = min(self.dims, size)
        turned = [*range(0, dims, 2), *range(1, dims, 2), *range(dims, size)]
        return [head + row for head in range(0, rows, size) for row in turned]


@dataclass(frozen=True)
class CollectRows:
    """Row operation: split each of `groups` equal groups of rows into parts of `sizes`.

    The result has the first parts of all groups, then the second ones, and so on. Qwen3-Next stores
    query, key and values of one key head together.
    """

    groups: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"parts of {self.groups} groups collected"


@dataclass(frozen=True)
class Transpose:
    """Value operation: a matrix stored `[in, out]` (Conv1D) becomes `[out, in]`."""

    def __str__(self) -> str:
        return "transposed"


@dataclass(frozen=True)
class Reshape:
    """Value operation: reshape in row-major order.

    A depthwise convolution is stored as `[channels, 1, taps]` or `[channels, taps]`.
    """

    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"reshaped to {list(self.shape)}"


@dataclass(frozen=True)
class AddConstant:
    """Value operation: `x + value`. GGUF stores the norms of Gemma 1 to 3 as `1 + w`."""

    value: float

    def __str__(self) -> str:
        return f"{'−' if self.value < 0 else '+'} {abs(self.value):g}"


@dataclass(frozen=True)
class Multiply:
    """Value operation: `x · value`."""

    value: float

    def __str__(self) -> str:
        return f"· {self.value:g}"


@dataclass(frozen=True)
class LogNeg:
    """Value operation: `log(−x)` of numbers below 0. GGUF stores `A_log` as `−exp(A_log)`."""

    def __str__(self) -> str:
        return "log(−x)"


RowOp = Rows | UnpairRows | CollectRows
_MOVING = RowOp | Transpose | Reshape  # operations that move but do not change numbers
Elementwise = AddConstant | Multiply | LogNeg


@dataclass(frozen=True)
class PerExpert:
    """Apply `op` to each item along the first axis: the matrix of every expert or head (`of`).

    A row operation stays a row operation if the items are matrices.
    """

    op: RowOp | Transpose
    of: str = "expert"

    def __str__(self) -> str:
        return f"each {self.of}: {self.op}"


Op = RowOp | Transpose | Reshape | Elementwise | PerExpert

Ranges = Mapping[str, Sequence[int]]  # of placeholders
NOWHERE: Ranges = {}


class Rename:
    """Checkpoint tensor `source` fills parameter `target` after the operations `ops`.

    `within`: the range of each placeholder; the default for `{layer}` is all layers.
    """

    __slots__ = ("ops", "source", "target", "within")

    def __init__(self, source: str, target: str, *ops: Op, within: Ranges = NOWHERE) -> None:
        self.source = source
        self.target = target
        self.ops = ops
        self.within = within

    def __repr__(self) -> str:
        return f"Rename({self.source!r} -> {self.target!r}, {list(map(str, self.ops))})"


@dataclass(frozen=True)
class Drop:
    """Checkpoint tensors matching `pattern` are known and not needed, for `reason`.

    A pattern ending in `.*` matches every name with this prefix that no other rule matches, such as
    a vision tower, or layers after the last one. `within` as in `Rename`.
    """

    pattern: str
    reason: str
    within: Ranges = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class ScaleTensor:
    """Checkpoint tensor `pattern` belongs to the quantized tensor `weight`.

    It is its scale, arranged by `grid`, or (`grid` None) a byte with the storage layout.
    """

    pattern: str
    weight: str
    grid: Grid | None
    within: Ranges = field(default_factory=dict, hash=False)


Rule = Rename | Drop | ScaleTensor


@dataclass(frozen=True)
class Load:
    """Load `source` times `scale` through `ops` into parameter `target`.

    `index`: the item along the parameter's first axis; None for the whole parameter.
    """

    source: str
    target: str
    ops: tuple[Op, ...]
    scale: Scale | None = None
    index: int | None = None

    @property
    def as_stored(self) -> bool:
        """Whether the parameter equals the stored tensor."""
        return not self.ops and self.scale is None and self.index is None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors that are read."""
        return (self.source, *(() if self.scale is None else self.scale.tensors))

    def unused(self, shape: Sequence[int]) -> int:
        """Numbers of its stored tensor of `shape` that no parameter needs, see `LaterRows`."""
        return sum(op.start * prod(shape[1:]) for op in self.ops if isinstance(op, LaterRows))

    @property
    def part(self) -> str:
        """The filled parameter or item: `blocks.0.mlp.W_up`, or `blocks.0.moe.W_up[3]`."""
        return self.target if self.index is None else f"{self.target}[{self.index}]"

    @property
    def words(self) -> tuple[str, ...]:
        """The operations on the stored numbers, in order."""
        scaled = () if self.scale is None else (str(self.scale),)
        return (*scaled, *(str(op) for op in self.ops))


@dataclass(frozen=True)
class Plan:
    """The result of applying rules to a list of names.

    `dropped`: (name, reason); `unexpected`: names that no rule matches. `scales`: suffix of a scale
    in place of `weight`, None if the weights are not quantized. `renames`: those of the rules.
    """

    loads: tuple[Load, ...]
    dropped: tuple[tuple[str, str], ...]
    unexpected: tuple[str, ...]
    scales: str | None = None
    renames: tuple[Rename, ...] = ()

    @property
    def surplus(self) -> tuple[str, ...]:
        """Tensors dropped because the model has no parameter for them."""
        return tuple(name for name, reason in self.dropped if reason == SURPLUS)

    def without_surplus(
        self, shapes: Mapping[str, tuple[int, ...]], keep: Collection[str] = ()
    ) -> Plan:
        """The plan with tensors dropped that fill no parameter in `shapes`, as in transformers.

        Tensors that would fill a parameter twice, and those in `keep`, stay unexpected.
        """
        parts = parts_to_fill(self.loads, shapes)
        kept: list[Load] = []
        others: list[Load] = []
        for load in self.loads:
            fits = load.part in parts or (load.index is None and load.target in shapes)
            (kept if fits else others).append(load)
        used = {name for load in kept for name in load.tensors}
        names = dict.fromkeys((*(n for load in others for n in load.tensors), *self.unexpected))
        dropped = [(name, SURPLUS) for name in names if name not in used and name not in keep]
        return replace(
            self, loads=tuple(kept), dropped=(*self.dropped, *dropped), unexpected=tuple(keep)
        )

    def source_of(self, part: str) -> str | None:
        """The usual name of the tensor that fills a parameter, or an item of it.

        The first item's tensor if each has its own; None if no rule fills it.
        """
        for wanted in (part, f"{part}[0]"):
            skeleton, numbers = _skeleton(wanted)
            for rule in self.renames:
                if _PLACEHOLDER.sub("{}", rule.target) == skeleton:
                    named = zip(_PLACEHOLDER.findall(rule.target), numbers, strict=True)
                    return _filled(rule.source, dict(named))
        return None


SURPLUS = "the model has no parameter for it"
# At most six digits: names are untrusted, and a million layers is out of bounds anyway.
_NUMBER = re.compile(r"(?<![^.[])(?:0|[1-9][0-9]{0,5})(?![^.\]])")
_PLACEHOLDER = re.compile(r"\{([a-z]+)\}")
_BELOW = ".*"


def plan(names: Iterable[str], rules: Sequence[Rule], config: ModelConfig) -> Plan:
    """Apply the rules to tensor names without reading data.

    An exact name takes precedence over a pattern, and a pattern over one ending in `.*`. Time is
    linear in the names: rules are looked up by name, or by name with its numbers removed.
    """
    found = _Patterns(rules, config)
    beside: dict[str, list[tuple[str, Grid | None]]] = {}
    loads: list[Load] = []
    dropped: list[tuple[str, str]] = []
    unexpected: list[str] = []
    for name in names:
        matches = found.matches(name)
        if not matches:
            unexpected.append(name)
        for rule, numbers in matches:
            if isinstance(rule, Drop):
                dropped.append((name, rule.reason))
            elif isinstance(rule, ScaleTensor):
                beside.setdefault(_filled(rule.weight, numbers), []).append((name, rule.grid))
            else:
                target, bracket, index = _filled(rule.target, numbers).partition("[")
                item = int(index[:-1]) if bracket else None
                loads.append(Load(name, target, rule.ops, index=item))
    scaled, unused = _scaled(loads, beside)
    called = (rule.pattern for rule in rules if isinstance(rule, ScaleTensor) and rule.grid)
    return Plan(
        loads=tuple(scaled),
        dropped=tuple(dropped),
        unexpected=(*unexpected, *unused),
        scales=next((pattern.rpartition(".")[2] for pattern in called), None),
        renames=tuple(rule for rule in rules if isinstance(rule, Rename)),
    )


_Ranges = tuple[tuple[str, Sequence[int]], ...]  # the placeholders of a pattern, in order


class _Patterns:
    """Rules by their patterns with `{}` for each placeholder."""

    def __init__(self, rules: Sequence[Rule], config: ModelConfig) -> None:
        self._rules: dict[str, list[tuple[Rule, _Ranges]]] = {}
        self._depths: dict[int, None] = {}  # numbers of parts before `.*`
        for rule in rules:
            skeleton = _PLACEHOLDER.sub("{}", _pattern(rule))
            self._rules.setdefault(skeleton, []).append((rule, _ranges(rule, config)))
            if skeleton.endswith(_BELOW):
                self._depths[skeleton.count(".")] = None

    def matches(self, name: str) -> list[tuple[Rule, dict[str, int]]]:
        """The rules that match a name, with the numbers of their placeholders."""
        begun = (".".join(name.split(".", parts)[:parts]) for parts in self._depths)
        for one in (name, *(one + _BELOW for one in begun if len(one) < len(name))):
            for skeleton, numbers in ((one, []), _skeleton(one)):
                found = _admitting(self._rules.get(skeleton, ()), numbers)
                if found:
                    return found
        return []


def _admitting(
    rules: Iterable[tuple[Rule, _Ranges]], numbers: Sequence[int]
) -> list[tuple[Rule, dict[str, int]]]:
    """Rules whose placeholders' ranges contain every number."""
    return [
        (rule, {name: number for (name, _), number in zip(ranges, numbers, strict=True)})
        for rule, ranges in rules
        if len(ranges) == len(numbers)
        and all(number in span for (_, span), number in zip(ranges, numbers, strict=True))
    ]


def every_name(rule: Rename, config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield each name that the rule matches, and the parameter that it fills or is an item of."""
    ranges = _ranges(rule, config)
    for numbers in product(*(span for _, span in ranges)):
        named = {name: number for (name, _), number in zip(ranges, numbers, strict=True)}
        yield _filled(rule.source, named), _filled(rule.target, named).partition("[")[0]


def parts_to_fill(
    loads: Iterable[Load], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of everything to fill, by `Load.part`: parameters in `shapes`, or their items.

    A parameter is split into items along its first axis if some load fills an item.
    """
    by_item = {load.target for load in loads if load.index is not None}
    parts: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name in by_item and shape:
            parts |= {f"{name}[{item}]": shape[1:] for item in range(shape[0])}
        else:
            parts[name] = shape
    return parts


def _scaled(
    loads: Sequence[Load], beside: Mapping[str, Sequence[tuple[str, Grid | None]]]
) -> tuple[list[Load], list[str]]:
    """The loads with the scales of their tensors, and the names of unused scales."""
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
    numbers = [int(part) for part in _NUMBER.findall(name)]
    return _NUMBER.sub("{}", name), numbers


def _filled(pattern: str, numbers: Mapping[str, int]) -> str:
    return _PLACEHOLDER.sub(lambda found: str(numbers[found[1]]), pattern)


def _pattern(rule: Rule) -> str:
    return rule.source if isinstance(rule, Rename) else rule.pattern


def _ranges(rule: Rule, config: ModelConfig) -> _Ranges:
    within: dict[str, Sequence[int]] = {"layer": range(len(config.layers)), **rule.within}
    return tuple((name, within[name]) for name in _PLACEHOLDER.findall(_pattern(rule)))


def moves_rows(op: Op) -> bool:
    """Whether an operation only chooses or reorders rows of a matrix or of each stacked matrix."""
    return isinstance(op.op if isinstance(op, PerExpert) else op, RowOp)


def packable(
    loads: Iterable[Load], formats: Mapping[str, str], names: Collection[str]
) -> dict[str, str]:
    """Parameters in `names` that can keep the file's format, with this format.

    Quantized blocks need kernels and rules that only move rows; 16-bit formats always qualify.
    Several tensors that fill one parameter need the same format. `formats`: of the checkpoint's
    tensors by name.
    """
    found: dict[str, set[str | None]] = {}
    for load in loads:
        if load.target not in names:
            continue
        stored, kept = formats[load.source], None
        ops = [op.op if isinstance(op, PerExpert) else op for op in load.ops]
        if stored in PACKED and load.index is None and all(isinstance(op, RowOp) for op in ops):
            kept = stored
        elif stored in IN_16_BITS and all(isinstance(op, _MOVING) for op in ops):
            kept = IN_16_BITS[stored]
        found.setdefault(load.target, set()).add(None if load.scale is not None else kept)
    return {name: kept for name, (kept, *more) in found.items() if kept is not None and not more}


def shape_after(shape: tuple[int, ...], ops: Sequence[Op]) -> tuple[int, ...] | None:
    """The shape after a rule's operations; None if they do not apply to `shape`."""
    found: tuple[int, ...] | None = shape
    for op in ops:
        if found is None:
            return None
        found = _shape_after(found, op)
    return found


def _shape_after(shape: tuple[int, ...], op: Op) -> tuple[int, ...] | None:
    match op:
        case Rows(start=start, stop=stop, groups=groups) if shape:
            fits = shape[0] % groups == 0 and stop <= shape[0] // groups
            return (groups * (stop - start), *shape[1:]) if fits else None
        case UnpairRows(heads=heads) if shape and shape[0] % heads == 0:
            return shape
        case CollectRows(groups=groups, sizes=sizes) if shape and shape[0] == groups * sum(sizes):
            return shape
        case Transpose() if len(shape) == 2:
            return (shape[1], shape[0])
        case Reshape(shape=wanted) if prod(wanted) == prod(shape):
            return wanted
        case PerExpert(op=inner) if len(shape) > 1:
            item = _shape_after(shape[1:], inner)
            return None if item is None else (shape[0], *item)
        case AddConstant() | Multiply() | LogNeg():
            return shape
    return None
