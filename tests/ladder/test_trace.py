"""What a rung shows is kept once, with its numbers and how it lies in memory."""

import torch

from llmcli.commands.ladder.measure.trace import Trace, shares_memory


def test_views_and_copies_are_told_apart():
    q = torch.arange(24.0).reshape(3, 8)
    heads = q.view(3, 2, 4).transpose(0, 1)
    trace = Trace()
    trace("split", heads, source=q)
    trace("merged", heads.transpose(0, 1).reshape(3, 8), source=heads)
    trace("copied", heads.clone(), source=heads)
    split, merged, copied = trace.steps
    assert split.source == ((3, 8), (8, 1))
    assert (split.shape, split.strides, split.moved) == ((2, 3, 4), (4, 8, 1), False)
    assert merged.moved is False  # these heads were a view, so that turning them back is one too
    assert copied.moved is True
    contiguous = heads.contiguous()
    assert not shares_memory(contiguous.transpose(0, 1).flatten(1), contiguous)


def test_each_section_has_its_own_steps_and_repeated_ones_have_none():
    """What comes first is kept, and not kept alive; lists have no strides."""
    trace = Trace()
    notes = []
    tensor = torch.tensor([1.0])
    trace("x", tensor)
    tensor.zero_()
    trace("x", torch.tensor([3.0]))
    trace("rows", [[1.0, 2.0], [3.0, 4.0]])
    for block in range(3):
        trace.section(f"block {block}", again=block > 0)
        trace("x", float(block), note=lambda block=block: notes.append(block) or "said")
    trace.section("after")
    trace("x", [4.0, 5.0], "(d)(d × n) = n", note="last", token=2)
    steps = trace.steps
    assert [(step.section, step.formula, step.values, step.note) for step in steps] == [
        ("", "x", ((1.0,),), ""), ("", "rows", ((1.0, 2.0), (3.0, 4.0)), ""),
        ("block 0", "x", ((0.0,),), "said"), ("after", "x", ((4.0, 5.0),), "last"),
    ]  # fmt: skip
    assert notes == [0]  # of what is not kept no words are made
    assert (steps[1].shape, steps[1].strides, steps[1].moved) == ((2, 2), (), None)
    assert (steps[3].axes, steps[3].letters, steps[3].token) == ("(d)(d × n) = n", ("n",), 2)
    assert steps[0].letters == ()


def test_large_matrices_keep_their_corner_and_small_ones_all():
    trace = Trace()
    trace("large", torch.arange(10000.0).reshape(100, 100))
    trace("small", torch.ones(3, 8, 8))
    trace("wide", torch.ones(3, 9))
    large, small, wide = trace.steps
    assert large.values == tuple(tuple(100.0 * i + j for j in range(4)) for i in range(4))
    assert (len(small.values), len(small.values[0])) == (8, 8)
    assert (len(wide.values), len(wide.values[0])) == (3, 4)
