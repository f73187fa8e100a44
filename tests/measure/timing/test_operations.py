"""Operations are counted between marks, and are those of the part that comes next."""

import sys

import torch
from timed_models import small, timed

from llmcli.commands.timing.measure.clock import OperationCount
from llmcli.ops.elements import add


def test_each_mark_has_the_operations_since_the_one_before():
    one = torch.ones(2, 2)
    with OperationCount() as count:
        one + one  # before the start: of nobody
        count.start()
        count("none")
        torch.nn.functional.linear(one, one)  # one call, whatever is in it
        assert one.shape == (2, 2)  # looked up, not computed
        count("product")
        (one * 2).view(4).add_(1)
        count("three")
        one.sum()
        count.stop()
    one.sum()  # nobody counts any more
    marks = count.marks()
    assert marks.names == ("none", "product", "three", "end")
    assert list(marks.seconds) == [0, 1, 3, 1]


def test_no_compiler_is_imported():
    """Of PyTorch: its 65 MiB would be in the peaks of what is measured next."""
    before = set(sys.modules)
    timed(small("llama"))
    assert not [name for name in set(sys.modules) - before if name.startswith("torch._dynamo")]


def test_parts_have_those_of_a_whole_run():
    report = timed(small("llama"), new_tokens=4)
    rows = torch.ones(1, 1, 8)
    with OperationCount() as count:  # our kernel's output, or PyTorch's sum
        add(rows, rows)
        count.stop()
    (one,) = count.marks().seconds
    for phase in report.phases:
        found = {part.part: part for part in phase.totals}
        assert found["residual"].operations == 2 * 2 * phase.calls * one  # two sums in each layer
        assert found["ffn_down"].operations >= 2 * phase.calls
        layers = {part.layer: part.operations for part in phase.parts if part.part == "residual"}
        assert layers == {0: 2 * phase.calls * one, 1: 2 * phase.calls * one}
        assert all(part.operations for part in phase.totals if part.bound)
