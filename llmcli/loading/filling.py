"""Copies one tensor of a checkpoint into its slot, a few MiB at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError
from llmcli.families.rules import (
    AddConstant,
    CollectRows,
    Elementwise,
    Load,
    LogNeg,
    Multiply,
    Op,
    PerExpert,
    Reshape,
    Rows,
    Transpose,
    UnpairRows,
    moves_rows,
)
from llmcli.kernels import native
from llmcli.loading.scales import Scaler
from llmcli.ops.quant import PLAIN, dequantize, quantize
from llmcli.records.work import LoadTimings
from llmcli.weights.dense import Dense, writable
from llmcli.weights.packed import MappedWeight
from llmcli.weights.weight import BlockQuantized, Weight

# Bytes of a matrix, stored and as numbers, at a time: bounds the memory needed in addition to the
# weights.
_CHUNK_BYTES = 4 << 20
_CUT = (
    b"error: a weight file that stays mapped became shorter or cannot be read any more\n"
    b"hint: fetch or copy it again, and do not change it while a model runs\n"
)
_GAP_BYTES = 1 << 17  # gaps between used rows from this size on are skipped


def fill(weight: Weight, checkpoint: Checkpoint, load_: Load, stages: LoadTimings) -> None:
    """Copy one checkpoint tensor through its operations into a weight or an item of it.

    Some rows at a time if every row is one of the file, stacks of transposed matrices one matrix at
    a time, vectors and a single transposed matrix as a whole. Raises CheckpointError for numbers
    outside an operation's domain.
    """
    if weight.in_file:
        return
    info, ops = checkpoint.tensors[load_.source], load_.ops
    target = _Blocks(weight, load_) if isinstance(weight, BlockQuantized) else _Slot(weight, load_)
    like, packed = target.like, None
    scaler = None if load_.scale is None else Scaler(checkpoint, load_, like)
    by_rows = _goes_by_rows(info, ops)
    changes = [op for op in ops if not (by_rows and moves_rows(op))]
    decoded = by_rows and scaler is None and not changes  # without a change
    dtype = like.dtype if decoded else _wide(like)
    if decoded and isinstance(weight, BlockQuantized) and weight.format == info.format:
        packed = weight
    pieces = _items(info, ops)
    if by_rows:
        pieces = _row_chunks(info, ops, 0 if packed else info.shape[-1] * dtype.itemsize)
    for start, stop, chosen, to in pieces:
        with stages("read", (stop - start) * _row_bytes(info)):
            raw = _raw_rows(checkpoint, info, start, stop, like.device)
            scales = None if scaler is None else scaler.read(start, stop)
        whole = len(chosen) == len(raw)
        if packed is not None:
            with stages("pack"):
                packed.write(to, raw if whole else raw[chosen])
            continue
        with stages("convert"):
            out = target.part(to) if decoded and whole else None
            values = dequantize(raw, info.format, dtype=dtype, out=out)
            if out is not None:
                continue
            if scaler is not None and scales is not None:
                scaler.apply(values, scales, start)
            if by_rows:
                values = _with_operations(values, changes, info.name)
                values = values if whole else values[chosen.to(like.device)]
            else:
                values = values.view(-1, *info.shape[1:])
                values = _with_operations(values, changes, info.name)
                values = values.reshape(-1, values.shape[-1])
                to = torch.arange(len(values)) + start // len(raw) * len(values)
        with stages(target.stage):
            target.write(to, values)


class _Slot:
    """A dense weight or an item of it, to which numbers are copied."""

    stage = "convert"

    def __init__(self, weight: Weight, load_: Load) -> None:
        slot = writable(weight)
        slot = slot if load_.index is None else slot[load_.index]
        self.like = slot if slot.ndim > 1 else slot[None]

    def part(self, to: Tensor) -> Tensor | None:
        """A view of the rows `to`, if they are consecutive in memory."""
        slot, first, rows = self.like, int(to[0]), self.like.shape[-2]
        if not bool((to.diff() == 1).all()):
            return None
        if slot.ndim == 2 or slot.is_contiguous():
            slot = slot.view(-1, slot.shape[-1])
        elif first // rows == int(to[-1]) // rows:  # each matrix is part of a larger one
            slot, first = slot[first // rows], first % rows
        else:
            return None
        return slot[first : first + len(to)]

    def write(self, to: Tensor, numbers: Tensor) -> None:
        """Copy to the rows `to`, counted through all matrices."""
        part, slot = self.part(to), self.like
        if part is not None:
            part.copy_(numbers)
            return
        to, rows = to.to(slot.device), slot.shape[-2]
        slot[(to,) if slot.ndim == 2 else (to // rows, to % rows)] = numbers.to(slot.dtype)


class _Blocks:
    """A weight in blocks or an item of it, for which numbers are quantized."""

    stage = "pack"

    def __init__(self, weight: BlockQuantized, load_: Load) -> None:
        self.like = torch.empty(0)
        self._weight = weight
        self._first = (load_.index or 0) * weight.shape[-2]

    def part(self, to: Tensor) -> Tensor | None:
        """None: numbers are not stored."""

    def write(self, to: Tensor, numbers: Tensor) -> None:
        """Quantize and write to the rows `to`, a few MiB at a time."""
        step = max(32, _CHUNK_BYTES // (4 * numbers.shape[1]))
        for start in range(0, len(to), step):
            part = numbers[start : start + step].contiguous()
            places = self._first + to[start : start + step]
            self._weight.write(places, quantize(part, self._weight.format))


def mapped(checkpoint: Checkpoint, load_: Load) -> MappedWeight:
    """A mapped matrix (or experts') in the file's blocks, whose rows `load_` at most reorders.

    Raises CheckpointError if the file has changed or cannot be mapped.
    """
    info = checkpoint.tensors[load_.source]
    *experts, _, columns = info.shape
    rows = torch.arange(prod(info.shape[:-1]))
    order = row_order(load_.ops, info.shape[:-1], info.name).flatten().contiguous()
    in_order = len(order) == len(rows) and bool((order == rows).all())
    data = _in_file(checkpoint, info).view(len(rows), _row_bytes(info))
    return MappedWeight(
        info.format, columns, data, None if in_order else order, experts[0] if experts else None
    )


def in_16_bits(checkpoint: Checkpoint, load_: Load, inputs: torch.dtype) -> Dense:
    """A mapped 16-bit matrix (or experts') in the file's format, for inputs of dtype `inputs`.

    Raises CheckpointError if the file has changed or cannot be mapped.
    """
    info = checkpoint.tensors[load_.source]
    data = _in_file(checkpoint, info).view(PLAIN[info.format]).view(info.shape)
    return Dense(data, inputs, in_file=True)


def _in_file(checkpoint: Checkpoint, info: TensorInfo) -> Tensor:
    """The tensor's mapped bytes (uint8), unread; later truncation ends llmcli with exit code 4."""
    if native.level() is not None:
        native.function("llmcli_when_cut", "p")(_CUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the memory is read-only
        return torch.frombuffer(checkpoint.raw(info.name), dtype=torch.uint8)


def row_order(ops: Sequence[Op], shape: tuple[int, ...], source: str) -> Tensor:
    """The stored row of each result row after all row-moving operations.

    `shape`: stored shape without its last axis; for a vector its elements are the rows.
    """
    rows = torch.arange(prod(shape)).view(shape)
    return _with_operations(rows, [op for op in ops if moves_rows(op)], source)


def _goes_by_rows(info: TensorInfo, ops: Sequence[Op]) -> bool:
    """Whether every result row is a row of the file, up to element-wise operations."""
    inside = any(isinstance(op, PerExpert) for op in ops)
    return len(info.shape) > 1 + inside and all(
        isinstance(op, Elementwise) or moves_rows(op) for op in ops
    )


def _goes_by_item(ops: Sequence[Op]) -> bool:
    """Whether every item of the result depends on one item of the file."""
    return all(isinstance(op, PerExpert | Elementwise) for op in ops)


def _row_bytes(info: TensorInfo) -> int:
    return info.nbytes // max(1, prod(info.shape[:-1]))


def _row_chunks(
    info: TensorInfo, ops: Sequence[Op], wide_bytes: int
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield rows in file order, some MiB at a time: (first, last + 1, selection, target rows).

    A row counts its bytes in the file, or `wide_bytes` if more.
    """
    row_bytes = _row_bytes(info)
    rows = row_order(ops, info.shape[:-1], info.name).flatten()
    stored, place = rows.sort()  # stored row `stored[i]` of the file → row `place[i]` of the slot
    chunk = max(1, _CHUNK_BYTES // max(row_bytes, wide_bytes))
    done = 0
    while done < len(rows):
        start = int(stored[done])
        here = slice(done, int(torch.searchsorted(stored, start + chunk)))
        gaps = ((stored[here].diff() - 1) * row_bytes > _GAP_BYTES).nonzero()
        if len(gaps):
            here = slice(done, done + int(gaps[0]) + 1)
        done, stop = here.stop, int(stored[here.stop - 1]) + 1
        yield start, stop, stored[here] - start, place[here]


def _items(info: TensorInfo, ops: Sequence[Op]) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Like `_row_chunks`, all rows at once, or those of one matrix of a stack at a time."""
    rows = prod(info.shape[:-1])
    step = info.shape[1] if len(info.shape) == 3 and _goes_by_item(ops) else rows
    for start in range(0, rows, step):
        yield start, start + step, torch.arange(step), torch.arange(step)


def _with_operations(values: Tensor, ops: Sequence[Op], source: str) -> Tensor:
    """Apply a rule's operations from left to right; `check_fit` has validated them.

    On the numbers 0, 1, 2 … row operations give the order of the stored rows.
    """
    for op in ops:
        values = _with_operation(values, op, source)
    return values


def _with_operation(values: Tensor, op: Op, source: str) -> Tensor:
    match op:
        case Rows(start=start, stop=stop, groups=groups):
            grouped = values.reshape(groups, -1, *values.shape[1:])
            return grouped[:, start:stop].flatten(0, 1)
        case UnpairRows():
            return values[torch.tensor(op.order(len(values)), device=values.device)]
        case CollectRows(groups=groups, sizes=sizes):
            grouped = values.reshape(groups, -1, *values.shape[1:])
            parts = grouped.split_with_sizes(list(sizes), 1)
            return torch.cat([part.flatten(0, 1) for part in parts])
        case Transpose():
            return values.transpose(0, 1)
        case Reshape(shape=shape):
            return values.reshape(shape)
        case PerExpert(op=inner) if len(values) == 1:
            return _with_operation(values[0], inner, source)[None]
        case PerExpert(op=inner):
            return torch.stack([_with_operation(item, inner, source) for item in values])
        case AddConstant(value=constant):
            return values + constant
        case Multiply(value=factor):
            return values * factor
        case LogNeg():
            if not bool((values < 0).all()):
                raise CheckpointError(
                    f"`{shown(source)}` should be −exp of a number, but has a value"
                    " that is not below 0"
                )
            return (-values).log()


def _wide(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def read_values(checkpoint: Checkpoint, info: TensorInfo, like: Tensor) -> Tensor:
    """A tensor's numbers in at least float32 on the device of `like`."""
    raw = _raw_rows(checkpoint, info, 0, prod(info.shape[:-1]), like.device)
    return dequantize(raw, info.format, dtype=_wide(like)).view(info.shape)


def _raw_rows(
    checkpoint: Checkpoint, info: TensorInfo, start: int, stop: int, device: torch.device
) -> Tensor:
    """The bytes of some rows, uint8 `[rows, bytes]`; a vector is one row, a stack has all its own.
    """
    row_bytes = _row_bytes(info)
    data = checkpoint.read(info.name, start * row_bytes, stop * row_bytes)
    return torch.frombuffer(data, dtype=torch.uint8).view(stop - start, row_bytes).to(device)
