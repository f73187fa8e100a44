"""The specs themselves: names, axes and their letters, formulas, bytes, and visible pairs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from anatomy_configs import GPT, QWEN, layers, models
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import partition, roots, storages
from zoo import MODELS

from llmcli.commands.shapes.measure import ShapesRequest, fold, numbered, unfold
from llmcli.config.attention import visible_pairs
from llmcli.decoder.decoder import Decoder
from llmcli.graph.graph import graph
from llmcli.graph.ops import size
from llmcli.graph.plan import parameters, plan, states
from llmcli.graph.precision import Precision
from llmcli.graph.spec import Call, TensorSpec
from llmcli.inspect.kernel import rules
from llmcli.model import dtype_name
from llmcli.ui.facts import AXES


def test_specs_as_they_are_written(as_written):
    """Axes, the documents' letters, sizes, dtypes, bytes and formulas of all that a model has.

    Of one with biases, norms of queries and keys and a head of its own; the axes of GPT-2; what
    enters the scores of others. More is in transcripts/shapes-names.txt.
    """
    found = {}
    size = {"batch": 2, "tokens": 5, "past": 0, "phase": "prefill", "dtype": "bfloat16"}
    for title, config in (("qwen", QWEN), ("gpt2", GPT)):
        kept = states(config, batch=2, capacity=10, dtype="float16")
        lines = found[title] = []
        for spec in (*parameters(config), *plan(config, Call(**size)).tensors, *kept):
            documented = request(config).documented(spec.axes, spec.layer)
            lines.append(f"{spec.name}: {' '.join(spec.axes)} ({' '.join(documented)})")
            if config is QWEN or spec.kind == "state":
                shape = " × ".join(map(str, spec.shape))
                lines.append(f"  {shape} {spec.dtype}, {spec.bytes} B: {spec.formula}")
    lines = found["scores"] = []
    for change in (
        {"scale": 0.3, "rope": None}, {"rope": None, "qk_norm": None}, {"heads": 3, "kv_heads": 3}
    ):  # fmt: skip
        mixer = QWEN.layers[0].attention.changed(**change)
        config = replace(QWEN, layers=(QWEN.layers[0].with_attention(mixer),))
        lines += [spec.formula for spec in plan(config, Call(**size)).derived[:2]]
    specs = plan(MODELS["clipped projections"], Call(**size)).tensors
    lines += [spec.formula for spec in specs if spec.name.endswith("q_norm")]
    as_written(Path(__file__).with_name("specs.txt"), found)


@settings(max_examples=40, deadline=None)
@given(models())
def test_formulas_are_those_that_explain_derives_with(config):
    """Two views never write one tensor in two ways."""
    specs = plan(config, Call(batch=1, tokens=3, past=0, phase="prefill", dtype="float32")).tensors
    derived = {name: rule.formula for name, rule in rules(config).items()}
    assert [spec.name for spec in specs] == list(derived)
    for spec in specs:
        said = derived[spec.name].removesuffix(", H of the last block")
        if spec.name.endswith(".pattern"):  # explain goes on to say what S is
            said = said.partition(" = softmax(Q")[0]
        if spec.name != "logits":  # which explain derives in one with `logits_raw`
            assert spec.formula == said


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
def test_visible_pairs_against_the_mask_itself(window):
    for past in (0, 1, 2, 5, 8):
        for tokens in (1, 2, 5, 9):
            cells = sum(
                key <= query and (window is None or key > query - window)
                for query in range(past, past + tokens)
                for key in range(past + tokens)
            )
            assert visible_pairs(tokens, past, window) == cells


def request(config, tokens=5):
    precision = Precision.of("float32")
    return ShapesRequest(config=config, batch=2, tokens=tokens, precision=precision)


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_every_shape_is_what_its_letters_say(config, batch, tokens, past):
    """Small sizes: T = D, H = Hk, dh = dv and other collisions are all among the examples."""
    given = {"batch": batch, "tokens": tokens, "past": past, "phase": "prefill"}
    specs = (
        *parameters(config),
        *plan(config, Call(**given)).tensors,
        *states(config, batch=batch, capacity=past + tokens),
    )
    for spec in specs:
        sizes = {**graph(config).sizes(spec.layer), "B": batch, "T": tokens, "S": past + tokens}
        assert tuple(size(axis, sizes) for axis in spec.axes) == spec.shape, spec.name
        assert len(request(config).documented(spec.axes, spec.layer)) == len(spec.axes)


def test_a_letter_does_not_follow_a_size_that_happens_to_be_equal():
    """With T = D and H = Hk the letters are those of a call where nothing is equal."""
    mixer = replace(QWEN.layers[0].attention, heads=4, kv_heads=4, head_dim=3, value_dim=3)
    square = replace(QWEN, width=12, layers=(QWEN.layers[0].with_attention(mixer),))

    def axes(config, tokens):
        given = {"batch": tokens, "tokens": tokens, "past": 0, "phase": "prefill"}
        return {spec.name: spec.axes for spec in plan(config, Call(**given)).tensors}

    assert axes(square, 12) == axes(QWEN, 5)


def test_unknown_letters_are_errors():
    for letter, layer in (("Z", 0), ("H", None), ("P", None)):
        with pytest.raises(KeyError):
            size(letter, request(QWEN).sizes("prefill", layer))
    assert size("P", request(GPT).sizes("prefill", None)) == 64


def test_a_step_computes_the_last_row_only():
    step = request(GPT, tokens=7)
    assert step.documented(("B", "H", "T", "S"), 0, "decode") == ("b", "h", "1", "n")
    assert step.sizes("decode", None)["S"] == 8


# the specs say what the decoder does: names, order, shapes, dtypes, storage, views. Parameters and
# what is derived are in `test_measure_shapes`


@settings(max_examples=60, deadline=None)
@given(
    models(), st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(0, 9)),
    st.sampled_from(["bfloat16", "float32", "float64"]), st.sampled_from(["all", "last"]),
)  # fmt: skip
def test_a_call_emits_and_keeps_what_the_specs_say(config, sizes, dtype, logits):
    """Views of a named tensor are that tensor, as far as they go; all else has its own memory."""
    batch, tokens, past = sizes
    decoder, emitted = Decoder(config, Precision.of(dtype), device="cpu"), []
    state = decoder.new_state(batch, past + tokens)
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    if past:
        decoder(ids.new_zeros(batch, past), state)
    decoder(ids, state, tap=lambda *one: emitted.append(one), logits=logits)
    seen = dict(emitted)
    phase = "decode" if tokens == 1 and past else "prefill"
    call = Call(batch=batch, tokens=tokens, past=past, phase=phase, dtype=dtype)
    specs = plan(config, call, logits=logits).written
    assert [(spec.name, spec.shape, spec.dtype) for spec in specs] == [
        (name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in emitted
    ]
    assert {spec.phase for spec in specs} == {phase}
    assert partition(roots(specs)) == partition(storages(seen))
    for spec in specs:
        if spec.shares in seen and seen[spec.name].shape[1] == seen[spec.shares].shape[1]:
            assert seen[spec.name].data_ptr() == seen[spec.shares].data_ptr()
    kept = states(config, batch=batch, capacity=past + tokens, dtype=dtype)
    assert {spec.name: spec.shape for spec in kept} == {
        name: tuple(tensor.shape) for name, tensor in state.tensors().items()
    }
    assert sum(spec.bytes for spec in kept) == state.nbytes


# repeated layers in one row: only where they are equal, and every row says the truth of all

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
    rows = fold(tensors, config, lambda spec: None)
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
    rows = {row.name: row for row in fold(tensors_of(config), config, lambda spec: None)}
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

    names = [row.name for row in fold(tensors_of(config), config, stored)]
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
    rows = fold(wrong, config, lambda spec: None)
    assert [row.layers for row in rows if row.name.endswith("attn.W_k")] == [(0, 2), (1,)]


def test_a_number_is_only_a_whole_part_of_a_name():
    assert numbered("model.layers.3.mlp3.w", 3, "{}") == "model.layers.{}.mlp3.w"
    assert numbered("h.1.attn.c_attn.weight", 1, "{0-1}") == "h.{0-1}.attn.c_attn.weight"
    assert numbered("blk.13.a", 3, "{}") == "blk.13.a"
    assert numbered("layers.0.norms.0.w h.0.a", 0, "{}") == "layers.{}.norms.0.w h.{}.a"
    assert numbered("h.1.n", 2, "{1-2}", "{0-1}") == "h.{0-1}.n"  # a norm of the layer before
    assert numbered("h.1.experts.0", 1, "{i}", "{i-1}") == "h.{i}.experts.0"


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


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_every_axis_has_words(config):
    axes = {axis for (spec,) in tensors_of(config) for axis in spec.axes} - {"1"}
    assert {letter for axis in axes for letter in axis.split("·")} <= AXES.keys()
