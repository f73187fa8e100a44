"""Letters: what each stands for in one model, and what the documents call it."""

from dataclasses import replace

import pytest
from anatomy_configs import GPT, QWEN, models
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.anatomy import parameters, plan, states
from llmcli.anatomy.letters import Letters
from llmcli.graph.spec import Call


def letters(config, batch=2, tokens=5, past=0):
    return Letters(config=config, batch=batch, tokens=tokens, past=past)


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_every_shape_is_what_its_letters_say(config, batch, tokens, past):
    """Small sizes: T = D, H = Hk, dh = dv and other collisions are all among the examples."""
    call = letters(config, batch, tokens, past)
    given = {"batch": batch, "tokens": tokens, "past": past, "phase": "prefill"}
    specs = (
        *parameters(config),
        *plan(config, Call(**given)).tensors,
        *states(config, batch=batch, capacity=past + tokens),
    )
    for spec in specs:
        assert tuple(call.size(axis, spec.layer) for axis in spec.axes) == spec.shape, spec.name
        assert len(call.documented(spec.axes, spec.layer)) == len(spec.axes)


def test_a_letter_does_not_follow_a_size_that_happens_to_be_equal():
    """With T = D and H = Hk the letters are those of a call where nothing is equal."""
    mixer = replace(QWEN.layers[0].attention, heads=4, kv_heads=4, head_dim=3, value_dim=3)
    square = replace(QWEN, width=12, layers=(QWEN.layers[0].with_attention(mixer),))

    def axes(config, tokens):
        given = {"batch": tokens, "tokens": tokens, "past": 0, "phase": "prefill"}
        return {spec.name: spec.axes for spec in plan(config, Call(**given)).tensors}

    assert axes(square, 12) == axes(QWEN, 5)


def test_unknown_letters_are_errors():
    with pytest.raises(KeyError):
        letters(QWEN).size("Z", 0)
    with pytest.raises(KeyError):
        letters(QWEN).size("H", None)
    with pytest.raises(KeyError):
        letters(QWEN).size("P", None)
    assert letters(GPT).size("P", None) == 64


@pytest.mark.parametrize(
    ("config", "axes", "documents"),
    [
        (GPT, ("B", "T", "D"), ("b", "n", "d")),
        (GPT, ("B", "H", "T", "dh"), ("b", "h", "n", "d/h")),
        (GPT, ("B", "H", "T", "S"), ("b", "h", "n", "n")),
        (GPT, ("D", "H·dh"), ("d", "d")),
        (GPT, ("B", "T", "F"), ("b", "n", "4d")),
        (GPT, ("V", "D"), ("v", "d")),
        (QWEN, ("B", "Hk", "S", "dv"), ("b", "h_kv", "n", "d_v")),
        (QWEN, ("D", "H·dh"), ("d", "h·d_k")),
        (QWEN, ("Hk·dh",), ("h_kv·d_k",)),
        (QWEN, ("B", "T", "1"), ("b", "n", "1")),
        (QWEN, ("F", "D"), ("F", "d")),
    ],
)
def test_the_documents_letters(config, axes, documents):
    assert letters(config).documented(axes, 0) == documents


def test_a_step_computes_the_last_row_only():
    step = letters(GPT, tokens=1, past=7)
    assert step.documented(("B", "H", "T", "S"), 0) == ("b", "h", "1", "n")
    assert step.size("S", None) == 8
