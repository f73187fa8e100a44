"""The dry run of a checkpoint's names and shapes against the parameters of its model."""

from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

from llmcli.anatomy import parameters
from llmcli.errors import CheckpointError
from llmcli.families import Rows, Transpose, UnpairRows, find, parts_to_fill, plan
from llmcli.families.rules import PerExpert, Reshape


@dataclass
class DryRun:
    config: object
    plan: object
    missing: list
    doubled: list
    misshapen: list

    @property
    def clean(self):
        return not (self.missing or self.doubled or self.misshapen or self.plan.unexpected)


def dry_run(model_type, kind, settings, shapes):
    """What the family's rules make of tensors `{name: shape in torch's order}`."""
    family = find(model_type, kind)
    if kind == "gguf":
        tensors = {name: SimpleNamespace(shape=tuple(shape)) for name, shape in shapes.items()}
        config = family.from_gguf(settings, tensors)
        rules = family.rules_gguf(config)
    else:
        config = family.from_hf(settings)
        rules = family.rules_hf(config)
    planned = plan(shapes, rules, config)
    specs = {spec.name: spec.stored_shape for spec in parameters(config)}
    wanted = parts_to_fill(planned.loads, specs)
    targets = [load.part for load in planned.loads]
    return DryRun(
        config=config,
        plan=planned,
        missing=[name for name in wanted if name not in targets],
        doubled=[name for name in wanted if targets.count(name) > 1],
        misshapen=[
            (load.part, wanted.get(load.part), after(shapes[load.source], load.ops))
            for load in planned.loads
            if wanted.get(load.part) != after(shapes[load.source], load.ops)
        ],
    )


def after(shape, ops):
    """The shape that the operations, from left to right, make of a stored shape."""
    shape = tuple(shape)
    for op in ops:
        match op:
            case Rows(start=start, stop=stop, groups=groups):
                assert shape[0] % groups == 0
                assert 0 <= start < stop <= shape[0] // groups
                shape = (groups * (stop - start), *shape[1:])
            case PerExpert(op=inner):
                shape = (shape[0], *after(shape[1:], [inner]))
            case Reshape():
                assert prod(op.shape) == prod(shape)
                shape = op.shape
            case Transpose():
                shape = shape[::-1]
            case UnpairRows(heads=heads, dims=dims):
                assert shape[0] % heads == 0
                assert dims % 2 == 0
                assert dims <= shape[0] // heads
    return shape


def read_or_refused(read):
    """What is read; None where that is refused, in one short line."""
    try:
        return read()
    except CheckpointError as caught:
        error = caught
    assert error.message.isprintable()
    assert len(error.message) < 300
    assert error.hint
    return None
