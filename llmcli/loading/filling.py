"""Copies one tensor of a checkpoint into its slot, a few MiB at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError
from llmcli.families import (
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
from llmcli.formats.dense import Dense, writable
from llmcli.formats.packed import MappedWeight
from llmcli.formats.weight import BlockQuantized, Weight
from llmcli.kernels import native
from llmcli.loading.scales import Scaler
from llmcli.ops.quant import PLAIN, dequantize, quantize
from llmcli.records.work import Stages

# Bytes of a matrix, stored and as numbers, at a time: bounds the memory needed in addition to the
# weights.
_CHUNK_BYTES = 4 << 20
_CUT = (
    b"error: a weight file that stays mapped became shorter or cannot be read any more\n"
    b"hint: fetch or copy it again, and do not change it while a model runs\n"
)
_GAP_BYTES = 1 << 17  # gaps between used rows from this size on are skipped


def fill(weight: Weight, checkpoint: Checkpoint, load_: Load, stages: Stages) -> None:
    """Copy one checkpoint tensor through its operations into a weight or an item of it.

    Matrices and stacks are copied some rows at a time, stacks of transposed matrices one matrix at
    a time, vectors and a single transposed matrix as a whole. Raises CheckpointError for numbers
    outside an operation's domain.
    """
    info = checkpoint.tensors[load_.source]
    if weight.in_file:
        return
    if isinstance(weight, BlockQuantized):
        if info.format == weight.format:
            _fill_packed(weight, checkpoint, info, load_.ops, stages)
        else:
            _fill_quantized(weight, checkpoint, load_, stages)
        return
    slot = writable(weight)
    slot = slot if load_.index is None else slot[load_.index]
    scaler = None if load_.scale is None else Scaler(checkpoint, load_, slot)
    if _goes_by_rows(info, load_.ops):
        _fill_rows(slot, checkpoint, info, load_.ops, scaler, stages)
    elif len(info.shape) == 3 and _goes_by_item(load_.ops):
        ops = [op.op if isinstance(op, PerExpert) else op for op in load_.ops]
        for item in range(info.shape[0]):
            values = read_values(checkpoint, info, slot, stages, item=item)
            with stages("convert"):
                slot[item].copy_(_with_operations(values, ops, info.name))
    else:
        values = read_values(checkpoint, info, slot, stages)
        with stages("convert"):
            if scaler is not None:
                scaler.apply(values, scaler.read(0, len(values)), 0)
            slot.copy_(_with_operations(values, load_.ops, info.name))


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
    return len(info.shape) > 1 + inside and all(moves_rows(op) or _is_elementwise(op) for op in ops)


def _goes_by_item(ops: Sequence[Op]) -> bool:
    """Whether every item of the result depends on one item of the file."""
    return all(isinstance(op, PerExpert) or _is_elementwise(op) for op in ops)


def _is_elementwise(op: Op) -> bool:
    return isinstance(op, Elementwise)


def _fill_rows(
    slot: Tensor,
    checkpoint: Checkpoint,
    info: TensorInfo,
    ops: Sequence[Op],
    scaler: Scaler | None,
    stages: Stages,
) -> None:
    """Copy rows of a matrix or a stack in file order, a few MiB at a time.

    Small gaps between used rows are read too.
    """
    changes = [op for op in ops if not moves_rows(op)]
    as_they_are = scaler is None and not changes
    dtype = slot.dtype if as_they_are else _wide(slot)
    flat = slot.ndim == 2 or slot.is_contiguous()  # otherwise each matrix is part of a larger one
    rows = slot.shape[-2]
    slot = slot.view(-1, slot.shape[-1]) if flat else slot
    for start, stop, chosen, to in _row_chunks(info, ops, info.shape[-1] * dtype.itemsize):
        with stages("read", (stop - start) * _row_bytes(info)):
            raw = _raw_rows(checkpoint, info, start, stop, slot.device)
            scales = None if scaler is None else scaler.read(start, stop)
        with stages("convert"):
            in_order = flat and stop - start == len(to) and bool((to.diff() == 1).all())
            part = slot[int(to[0]) : int(to[0]) + len(to)] if flat else slot
            if in_order and as_they_are:
                dequantize(raw, info.format, dtype=slot.dtype, out=part)
                continue
            values = dequantize(raw, info.format, dtype=dtype)
            if scaler is not None and scales is not None:
                scaler.apply(values, scales, start)
            values = _with_operations(values, changes, info.name)
            if in_order:
                part.copy_(values)
            else:
                to = to.to(slot.device)
                place = (to,) if flat else (to // rows, to % rows)
                slot[place] = values[chosen.to(slot.device)].to(slot.dtype)


def _fill_packed(
    weight: BlockQuantized,
    checkpoint: Checkpoint,
    info: TensorInfo,
    ops: Sequence[Op],
    stages: Stages,
) -> None:
    """Copy rows of a weight that keeps the file's blocks."""
    for start, stop, chosen, to in _row_chunks(info, ops, _row_bytes(info)):
        with stages("read", (stop - start) * _row_bytes(info)):
            raw = _raw_rows(checkpoint, info, start, stop, torch.device("cpu"))
        with stages("pack"):
            weight.write(to, raw if len(chosen) == len(raw) else raw[chosen])


def _fill_quantized(
    weight: BlockQuantized, checkpoint: Checkpoint, load_: Load, stages: Stages
) -> None:
    """Copy and quantize a weight, some rows at a time.

    Tensors stored in another order are read as a whole, or one expert at a time.
    """
    info = checkpoint.tensors[load_.source]
    *experts, rows, columns = weight.shape
    if experts and load_.index is None:
        ops = [op.op if isinstance(op, PerExpert) else op for op in load_.ops]
        scaler = None if load_.scale is None else Scaler(checkpoint, load_, torch.empty(0))
        for item in range(experts[0]):
            values = read_values(checkpoint, info, torch.empty(0), stages, item=item)
            if scaler is not None:
                first = item * info.shape[1]
                scaler.apply(values, scaler.read(first, first + info.shape[1]), first)
            _write(weight, _with_operations(values, ops, info.name), item * rows, stages)
        return
    if load_.scale is None and all(isinstance(op, Transpose) for op in load_.ops):
        values = read_values(checkpoint, info, torch.empty(0), stages)
        numbers = _with_operations(values, load_.ops, info.name)
    else:
        whole = Dense(torch.empty(rows, columns))
        fill(whole, checkpoint, replace(load_, index=None), stages)
        numbers = whole.tensor
    _write(weight, numbers, (load_.index or 0) * rows, stages)


def _write(weight: BlockQuantized, numbers: Tensor, first: int, stages: Stages) -> None:
    """Quantize and write numbers `[rows, columns]` from row `first` on."""
    step = max(32, _CHUNK_BYTES // (4 * numbers.shape[1]))
    with stages("pack"):
        for start in range(0, len(numbers), step):
            part = numbers[start : start + step].contiguous()
            places = torch.arange(first + start, first + start + len(part))
            weight.write(places, quantize(part, weight.format))


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


def read_values(
    checkpoint: Checkpoint,
    info: TensorInfo,
    like: Tensor,
    stages: Stages | None = None,
    *,
    item: int | None = None,
) -> Tensor:
    """A tensor's numbers in at least float32 on the device of `like`; with `item` only that item.

    Items are along the first axis.
    """
    shape = info.shape if item is None else info.shape[1:]
    rows = prod(shape[:-1])
    first = (item or 0) * rows
    stages = stages or Stages()
    with stages("read", rows * info.nbytes // max(1, prod(info.shape[:-1]))):
        raw = _raw_rows(checkpoint, info, first, first + rows, like.device)
    with stages("convert"):
        return dequantize(raw, info.format, dtype=_wide(like)).view(shape)


def _raw_rows(
    checkpoint: Checkpoint, info: TensorInfo, start: int, stop: int, device: torch.device
) -> Tensor:
    """The bytes of some rows, uint8 `[rows, bytes]`; a vector is one row, a stack has all its own.
    """
    row_bytes = info.nbytes // max(1, prod(info.shape[:-1]))
    data = checkpoint.read(info.name, start * row_bytes, stop * row_bytes)
    return torch.frombuffer(data, dtype=torch.uint8).view(stop - start, row_bytes).to(device)
