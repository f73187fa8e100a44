"""What several files of this folder ask of rules and of what reads a configuration."""

from math import prod

from llmcli.errors import CheckpointError
from llmcli.families.rules import PerExpert, Reshape, Rows, Transpose, UnpairRows


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
