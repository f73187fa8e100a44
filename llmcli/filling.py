"""One tensor of a checkpoint into its slot, a few MiB at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.families import Load, Op, Rows, Transpose, UnpairRows
from llmcli.model import Stages
from llmcli.ops.quant import dequantize
from llmcli.scales import Scaler

# Of a matrix, as it is stored and as numbers, at a time: bounds what loading needs beyond the
# weights themselves.
_CHUNK_BYTES = 4 << 20


def fill(slot: Tensor, checkpoint: Checkpoint, load_: Load, stages: Stages) -> None:
    """Copies one checkpoint tensor through its operations into its slot.

    Rows of a matrix some at a time; a vector, and a matrix that is stored transposed, as a whole.
    """
    info = checkpoint.tensors[load_.source]
    scaler = None if load_.scale is None else Scaler(checkpoint, load_.scale, slot)
    if len(info.shape) == 2 and Transpose() not in load_.ops:
        rows = _with_operations(torch.arange(info.shape[0]), load_.ops)
        _fill_rows(slot, checkpoint, info, rows, scaler, stages)
    else:
        values = read_values(checkpoint, info, slot, stages)
        with stages("convert"):
            if scaler is not None:
                scaler.apply(values, scaler.read(0, len(values)), 0)
            slot.copy_(_with_operations(values, load_.ops))


def _fill_rows(
    slot: Tensor,
    checkpoint: Checkpoint,
    info: TensorInfo,
    rows: Tensor,
    scaler: Scaler | None,
    stages: Stages,
) -> None:
    """Row `rows[i]` of the checkpoint's matrix → row i of the slot, a few MiB at a time."""
    first, last = int(rows.min()), int(rows.max()) + 1
    place = torch.full((last - first,), -1)  # rows between the first and the last may have no use
    place[rows - first] = torch.arange(len(rows))
    in_order = bool((rows.diff() == 1).all())
    row_bytes = info.nbytes // info.shape[0]
    dtype = slot.dtype if scaler is None else scaler.dtype
    chunk = max(1, _CHUNK_BYTES // max(row_bytes, info.shape[1] * dtype.itemsize))
    for start in range(first, last, chunk):
        stop = min(start + chunk, last)
        with stages("read", (stop - start) * row_bytes):
            raw = _raw_rows(checkpoint, info, start, stop, slot.device)
            scales = None if scaler is None else scaler.read(start, stop)
        with stages("convert"):
            part = slot[start - first : stop - first]
            if in_order and scaler is None:
                dequantize(raw, info.format, dtype=slot.dtype, out=part)
                continue
            values = dequantize(raw, info.format, dtype=dtype)
            if scaler is not None and scales is not None:
                scaler.apply(values, scales, start)
            if in_order:
                part.copy_(values)
            else:
                index = place[start - first : stop - first].to(slot.device)
                slot[index[index >= 0]] = values[index >= 0].to(slot.dtype)


def _with_operations(values: Tensor, ops: Sequence[Op]) -> Tensor:
    """The operations of a rule, from left to right; `check_fit` has seen that they can be done.

    On the numbers 0, 1, 2 … they give the order of the stored rows.
    """
    for op in ops:
        match op:
            case Rows(start=start, stop=stop):
                values = values[start:stop]
            case UnpairRows(heads=heads, dims=dims):
                groups = values.reshape(heads, -1, *values.shape[1:])
                turned = groups[:, :dims]
                parts = (turned[:, 0::2], turned[:, 1::2], groups[:, dims:])
                values = torch.cat(parts, 1).reshape(values.shape)
            case Transpose():
                values = values.transpose(0, 1)
    return values


def read_values(
    checkpoint: Checkpoint, info: TensorInfo, like: Tensor, stages: Stages | None = None
) -> Tensor:
    """A whole tensor as numbers, at least float32, on the device of `like`."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    rows = info.shape[0] if len(info.shape) > 1 else 1
    stages = stages or Stages()
    with stages("read", info.nbytes):
        raw = _raw_rows(checkpoint, info, 0, rows, like.device)
    with stages("convert"):
        return dequantize(raw, info.format, dtype=dtype).view(info.shape)


def _raw_rows(
    checkpoint: Checkpoint, info: TensorInfo, start: int, stop: int, device: torch.device
) -> Tensor:
    """The bytes of some rows, uint8 `[rows, bytes]`; a vector is one row."""
    rows = info.shape[0] if len(info.shape) > 1 else 1
    row_bytes = info.nbytes // rows
    data = checkpoint.read(info.name, start * row_bytes, stop * row_bytes)
    return torch.frombuffer(data, dtype=torch.uint8).view(stop - start, row_bytes).to(device)
