"""Repeated layers in one row: only where they are equal, and every row says the truth of all."""

from dataclasses import replace

import pytest
from anatomy_configs import GPT, QWEN, layers, models
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.commands.shapes.measure import fold, fold_kinds, numbered, unfold
from llmcli.graph.graph import graph
from llmcli.graph.plan import parameters, plan
from llmcli.graph.spec import Call, TensorSpec

CALL = {"batch": 1, "tokens": 3, "past": 0, "phase": "prefill", "dtype": "float32"}


@st.composite
def repeated(draw):
    """A model of up to 14 layers of at most three kinds, in any order."""
    kinds = draw(st.lists(layers(), min_size=1, max_size=3))
    order = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=14))
    return replace(draw(models()), layers=tuple(kinds[i] for i in order))


def tensors_of(config):
    return [(spec,) for spec in (*parameters(config), *plan(config, Call(**CALL)).tensors)]


def alike(config, row):
    return len({config.layers[layer] for layer in row.layers}) <= 1


@settings(max_examples=60, deadline=None)
@given(repeated())
def test_rows_are_the_tensors_again_and_no_two_kinds_are_one(config):
    tensors = tensors_of(config)
    rows = fold_kinds(tensors, config, lambda spec: None)
    said = [item for row in rows for item in unfold(row)]
    assert sorted(said, key=str) == sorted(tensors, key=str)
    assert all(alike(config, row) for row in rows)
    # of each kind of layer every tensor is one row, but for what the first layer of all reads
    blocks = [row for row in rows if row.layers]
    per_kind = sum(
        len([item for item in tensors if item[0].layer == config.layers.index(kind)])
        for kind in set(config.layers)
    )
    first = config.layers.count(config.layers[0]) > 1
    assert len(blocks) == per_kind + first
    assert len({row.name for row in rows}) == len(rows)


@settings(max_examples=30, deadline=None)
@given(repeated())
def test_rows_stand_in_execution_order(config):
    tensors = [item for item in tensors_of(config) if item[0].kind == "activation"]
    place = {item[0].name: number for number, item in enumerate(tensors)}
    rows = fold(tensors, config, lambda spec: None)
    for kind in set(config.layers):
        first = config.layers.index(kind)
        names = [row.phases[0].name for row in rows if row.layers and row.layers[0] == first]
        assert sorted(names, key=place.__getitem__) == names
    outside = [row.name for row in rows if not row.layers]
    assert outside[0] == "embed"
    assert outside[-2:] == ["logits_raw", "logits"]
    assert rows[-1].name == "logits"


def test_names_and_formulas_of_rows():
    config = replace(QWEN, layers=QWEN.layers * 5)
    rows = {row.name: row for row in fold_kinds(tensors_of(config), config, lambda spec: None)}
    assert rows["blocks.{0-4}.attn.q"].layers == (0, 1, 2, 3, 4)
    assert rows["blocks.0.resid_pre"].formula == "X = E"
    entry = rows["blocks.{1-4}.resid_pre"]
    assert entry.formula == "X = H of the block before = T⁵ + T³"
    assert entry.phases[0].shares == "blocks.0.resid_post"
    assert [item[0].shares for item in unfold(entry)][-1] == "blocks.3.resid_post"
    assert rows["logits"].layers == ()


def test_what_else_differs_splits_one_row_only():
    config = replace(QWEN, layers=QWEN.layers * 3)

    def stored(spec):
        return spec.name == "blocks.1.attn.W_v"

    names = [row.name for row in fold_kinds(tensors_of(config), config, stored)]
    at = names.index("blocks.{0,2}.attn.W_v")
    assert names[at + 1] == "blocks.1.attn.W_v"
    assert "blocks.{0-2}.attn.W_q" in names


def test_one_number_that_differs_is_seen():
    """Folding compares: a layer with another shape under the same configuration stays apart."""
    config = replace(QWEN, layers=QWEN.layers * 3)
    wrong = [
        tuple(
            replace(s, shape=(1, *s.shape[1:])) if s.name == "blocks.1.attn.W_k" else s
            for s in item
        )
        for item in tensors_of(config)
    ]
    rows = fold_kinds(wrong, config, lambda spec: None)
    assert [row.layers for row in rows if row.name.endswith("attn.W_k")] == [(0, 2), (1,)]


def test_a_number_is_only_a_whole_part_of_a_name():
    assert numbered("model.layers.3.mlp3.w", 3, "{}") == "model.layers.{}.mlp3.w"
    assert numbered("h.1.attn.c_attn.weight", 1, "{0-1}") == "h.{0-1}.attn.c_attn.weight"
    assert numbered("blk.13.a", 3, "{}") == "blk.13.a"


@settings(max_examples=30, deadline=None)
@given(models())
def test_every_tensor_has_words(config):
    for (spec,) in tensors_of(config):
        assert isinstance(spec, TensorSpec)
        assert 2 < len(graph(config).words(spec.name)) < 80
    words = graph(config).words
    assert words("cache.0.k") != words("cache.0.v")
    with pytest.raises(KeyError):
        words("blocks.0.attn.nothing")


def test_words_say_the_two_ends():
    assert "table" in graph(GPT).words(parameters(GPT)[0].name)
    assert "scores" in graph(GPT).words("blocks.0.attn.pattern")
