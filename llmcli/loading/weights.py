"""Loads a checkpoint's tensors into a decoder's parameters by rules, with a ledger."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.decoder.decoder import Decoder
from llmcli.devices import threads, wait_for
from llmcli.errors import CheckpointError, WeightMismatch
from llmcli.families.rules import Load, Plan, parts_to_fill, shape_after
from llmcli.graph.graph import graph
from llmcli.graph.ops import Normalize
from llmcli.loading.filling import fill
from llmcli.loading.scales import check_scale
from llmcli.ops.quant import PLAIN, check_format, quantize
from llmcli.prepare.ahead import Prefetcher
from llmcli.records.ledger import Ledger, LedgerEntry
from llmcli.records.work import LoadTimings, Progress
from llmcli.weights.dense import writable
from llmcli.weights.weight import BlockQuantized

# Bytes of weights from which threads pay off. Below, they save a few hundredths of a second on an
# idle machine; on a busy one they wait for each other after each of hundreds of operations, and
# loading takes seconds instead of tenths.
_THREADED = 1 << 30


def load_weights(
    decoder: Decoder,
    checkpoint: Checkpoint,
    plan: Plan,
    *,
    progress: Progress | None = None,
    stages: LoadTimings | None = None,
    ahead: Prefetcher | None = None,
) -> Ledger:
    """Stream every tensor of a validated plan (`check_fit`) into its slot, some rows at a time.

    Tensors packed by `ahead` are only waited for.

    `stages` receives `read` (from the file to the device, in stored bytes; a fused tensor is read
    for each of its parts), `pack` and `convert` (in bytes of packed and other parameters).
    """
    stages = stages or LoadTimings()
    weights = {name: decoder.weight(name) for name in decoder.weight_names}
    total = sum(weight.nbytes for weight in weights.values())
    done = 0
    filled = () if ahead is None else ahead.finish(torch.get_num_threads())
    with threads(1 if total < _THREADED else None):
        for load_ in plan.loads:
            weight = weights[load_.target]
            if load_.target not in filled:
                fill(weight, checkpoint, load_, stages)
            done += weight.nbytes // (1 if load_.index is None else weight.shape[0])
            if progress is not None:
                progress("loading weights", done, total)
    packed = sum(weight.nbytes for weight in weights.values() if isinstance(weight, BlockQuantized))
    if packed:
        stages.add("pack", 0.0, packed)
    with stages("convert", total - packed):
        for device in decoder.devices:
            wait_for(device)
    checkpoint.release()
    return ledger_of(
        plan,
        checkpoint,
        {name: weight.shape for name, weight in weights.items()},
        {name: weight.format for name, weight in weights.items()},
    )


def ledger_of(
    plan: Plan,
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    formats: Mapping[str, str],
) -> Ledger:
    """The ledger of a validated plan; `shapes`, and dtypes or block `formats`: of the parameters.

    Without `formats` nothing is loaded.
    """
    parts = parts_to_fill(plan.loads, shapes)
    entries = (
        _entry(load_, checkpoint.tensors, parts[load_.part], formats.get(load_.target))
        for load_ in plan.loads
    )
    return Ledger(entries=tuple(entries), dropped=plan.dropped, surplus=plan.surplus)


def randomize(decoder: Decoder, seed: int) -> None:
    """Seeded random weights: matrices normal with standard deviation 0.02, norms 1, biases 0.

    They are drawn on the CPU, so every device has the same numbers.
    """
    ops = (node.op for node in graph(decoder.config).nodes.values())
    neutral = {op.weight: 1.0 - op.norm.offset for op in ops if isinstance(op, Normalize)}
    generator = torch.Generator().manual_seed(seed)
    for name in decoder.weight_names:
        weight = decoder.weight(name)
        if isinstance(weight, BlockQuantized):
            _randomize_packed(weight, generator)
            continue
        slot = writable(weight)
        if name in neutral:
            slot.fill_(neutral[name])
        elif name.rpartition(".")[2].startswith("b"):
            slot.zero_()
        elif slot.device.type != "meta":
            drawn = slot
            if slot.device.type != "cpu":  # numbers go by the strides, too
                drawn = torch.empty_strided(slot.shape, slot.stride(), dtype=slot.dtype)
            slot.copy_(drawn.normal_(0.0, 0.02, generator=generator))


def _randomize_packed(weight: BlockQuantized, generator: torch.Generator) -> None:
    """Fill a packed matrix with quantized random numbers, some rows at a time."""
    columns = weight.shape[-1]
    rows = weight.count // columns
    step = max(1, (8 << 20) // columns)
    for start in range(0, rows, step):
        places = torch.arange(start, min(start + step, rows))
        drawn = torch.empty(len(places), columns).normal_(0.0, 0.02, generator=generator)
        weight.write(places, quantize(drawn, weight.format))


def check_fit(
    plan: Plan, tensors: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Validate the plan by names, shapes and formats in the headers, before reading data.

    Raises WeightMismatch if parameters and tensors do not match one to one, CheckpointError if a
    parameter is filled twice or part of a tensor would be ignored, UnsupportedModel for a format
    without a decoder.
    """
    expected = parts_to_fill(plan.loads, shapes)
    times = Counter(load_.part for load_ in plan.loads)
    missing = [part for part in expected if part not in times]
    # tensors of parts that this model lacks, and items beyond a parameter's last one
    foreign = [load_ for load_ in plan.loads if load_.part not in expected]
    whole = [load_.target for load_ in foreign if load_.index is None and load_.target in shapes]
    unexpected = [load_.source for load_ in foreign if load_.target not in whole]
    unexpected += plan.unexpected
    if missing:
        unexpected += plan.surplus
    if missing or unexpected:
        source = plan.source_of(missing[0]) if missing else None
        raise WeightMismatch(missing=missing, source=source, unexpected=unexpected)
    twice = [*whole, *(part for part, count in times.items() if count > 1)]
    if twice:
        raise CheckpointError(f"two tensors of the checkpoint are both `{twice[0]}`")
    misshapen, used = [], Counter[str]()
    for load_ in plan.loads:
        info, wanted = tensors[load_.source], expected[load_.part]
        check_format(info.format)
        check_scale(load_, tensors, plan.scales)
        used[load_.source] += math.prod(wanted) + load_.unused(info.shape)
        found = shape_after(info.shape, load_.ops)
        if found != wanted:
            misshapen.append((load_.part, load_.source, wanted, found or info.shape))
    if misshapen:
        raise WeightMismatch(misshapen=misshapen)
    for source, count in used.items():
        shape = list(tensors[source].shape)
        if count != math.prod(shape):
            raise CheckpointError(f"`{source}` is {shape}, but only {count} numbers are used")


def _entry(
    load_: Load, tensors: Mapping[str, TensorInfo], shape: tuple[int, ...], dtype: str | None
) -> LedgerEntry:
    info, scale = tensors[load_.source], load_.scale
    kept = info.format in PLAIN or dtype in (None, info.format)
    numbers = math.prod(shape) + load_.unused(info.shape)
    return LedgerEntry(
        parameter=load_.part,
        source=load_.source,
        stored=info.format,
        shape=info.shape,
        bytes=info.nbytes * numbers // max(1, math.prod(info.shape)),
        operations=load_.words,
        dequantized=scale is not None or not kept,
        dtype=dtype,
        filled=tuple(shape),
        scale_tensors=() if scale is None else scale.tensors,
    )
