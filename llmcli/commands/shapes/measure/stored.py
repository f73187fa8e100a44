"""Where the parameters lie in the files, from their headers. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from llmcli.anatomy import stored_shapes
from llmcli.checkpoints import Checkpoint
from llmcli.commands.shapes.report import Stored
from llmcli.config import ModelConfig
from llmcli.families import Rule, parts_to_fill, planned, shape_after
from llmcli.measure.fit import unscaled
from llmcli.records.checks import ViewCheck, difference
from llmcli.records.numbers import counted, together


def stored_tensors(
    checkpoint: Checkpoint, rules: Sequence[Rule], config: ModelConfig
) -> dict[str, Stored]:
    """Parameter → where it lies in the checkpoint's files; empty where there are no files."""
    found: dict[str, list[Stored]] = {}
    shapes = stored_shapes(config)
    loads = planned(checkpoint, rules, config, shapes).loads
    shapes = parts_to_fill(loads, shapes)
    for load in loads:
        info = checkpoint.tensors[load.source]
        beside = () if load.scale is None else load.scale.tensors
        whole = info.nbytes + sum(checkpoint.tensors[name].nbytes for name in beside)
        count = prod(shapes[load.part]) if load.part in shapes else 0
        stored = Stored(
            source=info.name,
            shape=info.shape,
            format=info.format,
            bytes=count * whole // max(1, prod(info.shape)),
            operations=load.words,
        )
        found.setdefault(load.target, []).append(stored)
    return {name: _as_one(parts) for name, parts in found.items()}


def _as_one(parts: Sequence[Stored]) -> Stored:
    """The tensors that fill one parameter item by item, as the first one with all their bytes."""
    source = together([part.source for part in parts])
    return replace(parts[0], source=source, bytes=sum(part.bytes for part in parts))


def stored_check(
    checkpoint: Checkpoint, rules: Sequence[Rule], config: ModelConfig
) -> tuple[ViewCheck, ...]:
    """Every stored shape makes its parameter's; none is missing. Nothing without tensors."""
    if not checkpoint.tensors:
        return ()
    shapes = stored_shapes(config)
    todo = planned(checkpoint, rules, config, shapes)
    parts = parts_to_fill(todo.loads, shapes)
    made = {
        load.part: shape_after(checkpoint.tensors[load.source].shape, load.ops)
        for load in todo.loads
    }
    wrong = [part for part, shape in parts.items() if made.get(part) != shape]
    wrong += (load.source for load in todo.loads if load.part not in parts)
    wrong += unscaled(todo, checkpoint.tensors)
    held, made_of = counted(len(checkpoint.tensors), "tensor"), counted(len(shapes), "parameter")
    other = counted(len(todo.surplus), "surplus tensor") if todo.surplus else "no other"
    words = f"the file has {held}, of which {made_of} can be made, and {other}"
    return (difference("stored", words, [*wrong, *todo.unexpected]),)


def file_tensors(checkpoint: Checkpoint) -> tuple[Stored, ...]:
    """The tensors of a file in its own order and by its own names."""
    return tuple(
        Stored(source=info.name, shape=info.shape, format=info.format, bytes=info.nbytes)
        for info in checkpoint.tensors.values()
    )
