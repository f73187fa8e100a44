"""Where the parameters lie in the files, from their headers. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from llmcli.anatomy import parameters
from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.config import ModelConfig
from llmcli.families import Plan, Rule, plan, shape_after
from llmcli.families.scales import scale_problem
from llmcli.measure.shapes import difference
from llmcli.reports.checks import ViewCheck
from llmcli.reports.numbers import counted
from llmcli.reports.shapes import Stored


def stored_tensors(
    checkpoint: Checkpoint, rules: Sequence[Rule], config: ModelConfig
) -> dict[str, Stored]:
    """Parameter → where it lies in the checkpoint's files; empty where there are no files."""
    found = {}
    counts = {spec.name: spec.count for spec in parameters(config)}
    for load in plan(checkpoint.tensors, rules, config).loads:
        info = checkpoint.tensors[load.source]
        beside = () if load.scale is None else load.scale.tensors
        whole = info.nbytes + sum(checkpoint.tensors[name].nbytes for name in beside)
        part = counts.get(load.target, 0) * whole // max(1, prod(info.shape))
        found[load.target] = Stored(
            source=info.name,
            shape=info.shape,
            format=info.format,
            bytes=part,
            operations=load.words,
        )
    return found


def stored_check(
    checkpoint: Checkpoint, rules: Sequence[Rule], config: ModelConfig
) -> tuple[ViewCheck, ...]:
    """Every stored shape makes its parameter's; none is missing. Nothing without tensors."""
    if not checkpoint.tensors:
        return ()
    todo = plan(checkpoint.tensors, rules, config)
    wanted = {spec.name: spec.stored_shape for spec in parameters(config)}
    made = {
        load.target: shape_after(checkpoint.tensors[load.source].shape, load.ops)
        for load in todo.loads
    }
    wrong = [name for name, shape in wanted.items() if made.get(name) != shape]
    wrong += unscaled(todo, checkpoint.tensors)
    held, made_of = counted(len(checkpoint.tensors), "tensor"), counted(len(wanted), "parameter")
    words = f"the file has {held}, of which {made_of} can be made, and no other"
    return (difference("stored", words, [*wrong, *todo.unexpected]),)


def unscaled(todo: Plan, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Parameters whose tensor lacks the scale that its format needs, or has one that is wrong."""
    return [
        load.target
        for load in todo.loads
        if scale_problem(load.source, load.scale, tensors, todo.scales) is not None
    ]


def file_tensors(checkpoint: Checkpoint) -> tuple[Stored, ...]:
    """The tensors of a file in its own order and by its own names."""
    return tuple(
        Stored(source=info.name, shape=info.shape, format=info.format, bytes=info.nbytes)
        for info in checkpoint.tensors.values()
    )
