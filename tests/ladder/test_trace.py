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


def test_a_formula_is_kept_where_it_comes_first():
    trace = Trace()
    trace("x", torch.tensor([1.0]))
    trace("y", 2.0)
    trace("x", torch.tensor([3.0]))
    assert [(step.formula, step.values) for step in trace.steps] == [
        ("x", ((1.0,),)),
        ("y", ((2.0,),)),
    ]


def test_each_section_has_its_own_steps_and_repeated_ones_have_none():
    trace = Trace()
    notes = []
    trace("x", 0.0)
    for block in range(3):
        trace.section(f"block {block}", again=block > 0)
        trace("x", float(block), note=lambda block=block: notes.append(block) or "said")
    trace.section("after")
    trace("x", [4.0, 5.0], "(d)(d × n) = n", note="last", token=2)
    steps = trace.steps
    assert [(step.section, step.values[0][0]) for step in steps] == [
        ("", 0.0),
        ("block 0", 0.0),
        ("after", 4.0),
    ]
    assert notes == [0]  # of what is not kept no words are made
    assert [step.note for step in steps] == ["", "said", "last"]
    assert (steps[2].axes, steps[2].letters, steps[2].token) == ("(d)(d × n) = n", ("n",), 2)
    assert steps[0].letters == ()


def test_lists_have_no_strides():
    trace = Trace()
    trace("rows", [[1.0, 2.0], [3.0, 4.0]])
    (step,) = trace.steps
    assert (step.shape, step.strides, step.moved) == ((2, 2), (), None)
    assert step.values == ((1.0, 2.0), (3.0, 4.0))


def test_large_matrices_keep_their_corner_and_small_ones_all():
    trace = Trace()
    trace("large", torch.arange(10000.0).reshape(100, 100))
    trace("small", torch.ones(3, 8, 8))
    trace("wide", torch.ones(3, 9))
    large, small, wide = trace.steps
    assert large.values == tuple(tuple(100.0 * i + j for j in range(4)) for i in range(4))
    assert (len(small.values), len(small.values[0])) == (8, 8)
    assert (len(wide.values), len(wide.values[0])) == (3, 4)


def test_what_is_shown_is_not_kept_alive():
    trace = Trace()
    tensor = torch.ones(2, 2)
    trace("x", tensor)
    tensor.zero_()
    assert trace.steps[0].values == ((1.0, 1.0), (1.0, 1.0))
