"""Whether a model fits a device, and its tensors the model. No torch."""

from __future__ import annotations

from llmcli.config.model import ModelConfig
from llmcli.families.rules import parts_to_fill, shape_after
from llmcli.families.scales import scale_problem
from llmcli.graph.cost import total_cost
from llmcli.graph.memory import PlannedRun, longest_context, memory_need
from llmcli.graph.precision import Precision
from llmcli.graph.spec import Call
from llmcli.prepare.prepared import Prepared
from llmcli.records.info import Device, DeviceFit


def fit(
    config: ModelConfig,
    device: Device,
    precision: Precision,
    *,
    batch: int,
    context: int,
    tokenizer: int,
) -> DeviceFit:
    """Bytes that `batch` sequences of `context` tokens need on a device, and what is free there.

    With a `tokenizer` of so many bytes.
    """
    where = {"cuda": device.device.startswith("cuda"), "native": device.bfloat16}
    planned = PlannedRun(config, precision, batch=batch, context=context, **where)
    need = memory_need(planned, tokenizer=tokenizer)
    last = Call(batch=batch, tokens=1, past=context - 1, phase="decode")
    token = total_cost(config, last, precision=precision)
    free, longest = device.free_bytes, None
    if free is not None and device.usable:
        most = config.embedding.positions or max(context, config.context)
        longest = longest_context(planned, need, free=free, most=most)
    fits = None if free is None or longest is None else need.needed_bytes <= free
    return DeviceFit(device=device, need=need, token=token, fits=fits, longest_context=longest)


def misfits(prepared: Prepared) -> list[str]:
    """Parameters that no tensor makes in their shape, then tensors without a place.

    `loading.weights.check_fit` raises for these before anything is read.
    """
    todo, tensors = prepared.plan, prepared.checkpoint.tensors
    parts = parts_to_fill(todo.loads, prepared.shapes)
    made = {load.part: shape_after(tensors[load.source].shape, load.ops) for load in todo.loads}
    wrong = [part for part, shape in parts.items() if made.get(part) != shape]
    foreign = [load.source for load in todo.loads if load.part not in parts]
    return [*wrong, *foreign, *todo.unexpected]


def unscaled(prepared: Prepared) -> list[str]:
    """Parameters whose tensor lacks the scale that its format needs, or has one that is wrong."""
    tensors, scales = prepared.checkpoint.tensors, prepared.plan.scales
    return [
        load.target
        for load in prepared.plan.loads
        if scale_problem(load.source, load.scale, tensors, scales) is not None
    ]
