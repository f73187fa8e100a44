"""In what arithmetic a model would be held, and whether it fits a device. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.counts import longest_context, memory_need
from llmcli.anatomy.work import total_work
from llmcli.checkpoints.checkpoint import Checkpoint
from llmcli.checkpoints.tensors import TensorInfo
from llmcli.config import ModelConfig
from llmcli.families import Plan, parts_to_fill, shape_after
from llmcli.families.scales import scale_problem
from llmcli.graph.spec import Call
from llmcli.loading.arithmetic import arithmetic_of
from llmcli.records.info import Device, DeviceFit


def chosen_arithmetic(
    checkpoint: Checkpoint,
    config: ModelConfig,
    todo: Plan | None,
    device: Device,
    dtype: str,
    quantize: str,
    activations: str = "auto",
    cache: str = "auto",
) -> Arithmetic:
    """See `arithmetic_of` and `Arithmetic.given`. Raises their errors."""
    return arithmetic_of(
        checkpoint,
        config,
        todo,
        dtype=dtype,
        quantize=quantize,
        device=device.device,
        bfloat16=device.bfloat16,
    ).given(activations, cache)


@dataclass(frozen=True, kw_only=True)
class Run:
    """`batch` sequences of `context` tokens, with a `tokenizer` of so many bytes."""

    batch: int
    context: int
    tokenizer: int


def fit(config: ModelConfig, device: Device, numbers: Arithmetic, run: Run) -> DeviceFit:
    """Bytes that a run needs on a device, against what is free there."""
    cuda = device.device.startswith("cuda")
    need = memory_need(
        config,
        numbers,
        batch=run.batch,
        context=run.context,
        cuda=cuda,
        native=device.bfloat16,
        tokenizer=run.tokenizer,
    )
    last = Call(batch=run.batch, tokens=1, past=run.context - 1, phase="decode")
    token = total_work(config, last, numbers=numbers)
    free, longest = device.free_bytes, None
    if free is not None and device.usable:
        most = config.embedding.positions or max(run.context, config.context)
        longest = longest_context(
            config, numbers, need, free=free, most=most, cuda=cuda, native=device.bfloat16
        )
    fits = None if free is None or longest is None else need.needed_bytes <= free
    return DeviceFit(device=device, need=need, token=token, fits=fits, longest_context=longest)


def misfits(
    todo: Plan, tensors: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Parameters in `shapes` that no tensor makes in that shape, then tensors without a place.

    `loading.weights.check_fit` raises for these before anything is read.
    """
    parts = parts_to_fill(todo.loads, shapes)
    made = {load.part: shape_after(tensors[load.source].shape, load.ops) for load in todo.loads}
    wrong = [part for part, shape in parts.items() if made.get(part) != shape]
    foreign = [load.source for load in todo.loads if load.part not in parts]
    return [*wrong, *foreign, *todo.unexpected]


def unscaled(todo: Plan, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Parameters whose tensor lacks the scale that its format needs, or has one that is wrong."""
    return [
        load.target
        for load in todo.loads
        if scale_problem(load.source, load.scale, tensors, todo.scales) is not None
    ]
