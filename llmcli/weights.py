"""Tensors of a checkpoint into the parameters of a decoder, by rules, with a ledger of them all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from llmcli.anatomy import parameters
from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.config import ModelConfig
from llmcli.devices import wait_for
from llmcli.errors import CheckpointError, WeightMismatch
from llmcli.families import Load, Op, Plan, Rows, Transpose, UnpairRows, shape_after
from llmcli.model import Ledger, LedgerEntry, Stages
from llmcli.nn.decoder import Decoder
from llmcli.ops.quant import PLAIN, check_format, dequantize
from llmcli.scaled import Scaler, check_scale

Progress = Callable[[str, int, int | None], None]

_CHUNK_BYTES = 4 << 20  # read at a time: bounds what loading needs beyond the weights themselves


def load_weights(
    decoder: Decoder,
    checkpoint: Checkpoint,
    todo: Plan,
    *,
    progress: Progress | None = None,
    stages: Stages | None = None,
) -> Ledger:
    """Streams every tensor of a plan that fits (`check_fit`) into its slot, some rows at a time.

    `stages` hears of `read` (from the file to the device, in stored bytes; a fused tensor is
    read for each of its parts) and of `convert` (in bytes of the parameters).
    """
    stages = stages or Stages()
    total = sum(slot.nbytes for slot in decoder.slots.values())
    done = 0
    for load_ in todo.loads:
        slot = decoder.slots[load_.target]
        _fill(slot, checkpoint, load_, stages)
        done += slot.nbytes
        if progress is not None:
            progress("loading weights", done, total)
    with stages("convert", total):
        wait_for(decoder.device)
    checkpoint.release()
    return ledger_of(todo, checkpoint, {name: slot.shape for name, slot in decoder.slots.items()})


def ledger_of(
    todo: Plan, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]
) -> Ledger:
    """What a plan that fits makes of every tensor; `shapes` are those of the parameters."""
    entries = (_entry(load_, checkpoint.tensors, shapes[load_.target]) for load_ in todo.loads)
    return Ledger(entries=tuple(entries), dropped=todo.dropped)


def randomize(decoder: Decoder, seed: int) -> None:
    """Seeded weights: matrices normal with deviation 0.02, norm weights 1, biases 0."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for name, slot in decoder.slots.items():
        last = name.rpartition(".")[2]
        if last == "w":
            slot.fill_(1.0)
        elif last.startswith("b"):
            slot.zero_()
        elif slot.device.type != "meta":
            slot.normal_(0.0, 0.02, generator=generator)


def check_fit(todo: Plan, tensors: Mapping[str, TensorInfo], config: ModelConfig) -> None:
    """Holds the plan against names, shapes and formats of the headers, before anything is read.

    Raises WeightMismatch where parameters and tensors do not match one to one, CheckpointError
    where one is filled twice or a part of a tensor would be ignored, UnsupportedModel for a
    format without a decoder.
    """
    expected = {spec.name: spec.stored_shape or spec.shape for spec in parameters(config)}
    times = Counter(load_.target for load_ in todo.loads)
    missing = [name for name in expected if name not in times]
    if missing or todo.unexpected:
        raise WeightMismatch(missing=missing, unexpected=todo.unexpected)
    twice = [name for name, count in times.items() if count > 1]
    if twice:
        raise CheckpointError(f"two tensors of the checkpoint are both `{twice[0]}`")
    misshapen, used = [], Counter[str]()
    for load_ in todo.loads:
        info, wanted = tensors[load_.source], expected[load_.target]
        check_format(info.format)
        check_scale(load_, tensors, todo.scales)
        used[load_.source] += math.prod(wanted)
        found = shape_after(info.shape, load_.ops)
        if found != wanted:
            misshapen.append((load_.target, load_.source, wanted, found or info.shape))
    if misshapen:
        raise WeightMismatch(misshapen=misshapen)
    for source, count in used.items():
        shape = list(tensors[source].shape)
        if count != math.prod(shape):
            raise CheckpointError(f"`{source}` is {shape}, of which {count} numbers have a use")


def _fill(slot: Tensor, checkpoint: Checkpoint, load_: Load, stages: Stages) -> None:
    """Copies one checkpoint tensor through its operations into its slot."""
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
    wide = 1 if scaler is None else scaler.dtype.itemsize  # a byte becomes a number of so many
    chunk = max(1, _CHUNK_BYTES // (row_bytes * wide))
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
            values = dequantize(raw, info.format, dtype=scaler.dtype if scaler else slot.dtype)
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


def _entry(
    load_: Load, tensors: Mapping[str, TensorInfo], shape: tuple[int, ...]
) -> LedgerEntry:
    info = tensors[load_.source]
    return LedgerEntry(
        parameter=load_.target,
        source=load_.source,
        stored=info.format,
        shape=tuple(shape),
        nbytes=info.nbytes * math.prod(shape) // max(1, math.prod(info.shape)),
        operations=tuple(str(op) for op in load_.ops),
        dequantized=info.format not in PLAIN or load_.scale is not None,
        scale=None if load_.scale is None else str(load_.scale),
        scale_tensors=() if load_.scale is None else load_.scale.tensors,
    )
